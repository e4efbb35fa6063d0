"""YAML is parsed as by OmegaConf, with source locations; invalid text is an error with its line, never a traceback."""

import math

import pytest
from omegaconf import OmegaConf

from rl_core.config.diagnostics import Problems, SourceLocation
from rl_train.yaml_reader import read_yaml

SCALARS = """1 -3 0x1F 0b11 012 1_000 1:30 1.5 .5 1e-5 1E3 -2.5e+10 1e5 .inf -.inf .nan true no On off yes null ~ text
'1e-5' "true" 2025-01-01 12:30:45 1.2.3 /path/to:x a#b"""


def read(text):
    problems = Problems()
    root = read_yaml(text, location=SourceLocation("c.yaml", 1, 1, "c.yaml"), problems=problems)
    return root, [str(problem) for problem in problems.found]


@pytest.mark.parametrize("scalar", SCALARS.split())
def test_scalars_are_parsed_as_by_omegaconf(scalar):
    ours = read(f"a: {scalar}")[0].plain()["a"]
    theirs = OmegaConf.to_container(OmegaConf.create(f"a: {scalar}"))["a"]
    assert type(ours) is type(theirs)
    assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))


def test_a_number_with_an_exponent_and_no_point_is_a_number():
    assert read("lr: 1e-5")[0].plain() == {"lr": 1e-5}


def test_a_lone_equals_sign_is_text():
    assert read("a: =")[0].plain() == {"a": "="}


def test_values_and_keys_have_line_and_column():
    root, _ = read("policy:\n  optimizer:\n    kwargs: {lr: 1,\n      betas: [2, 3]}\n")
    kwargs = ("policy", "optimizer", "kwargs")
    assert str(root.at(kwargs).key_location) == "c.yaml:3:5"
    assert str(root.at((*kwargs, "lr")).location) == "c.yaml:3:18"
    assert str(root.at((*kwargs, "betas")).key_location) == "c.yaml:4:7"
    assert str(root.at((*kwargs, "betas", 1)).location) == "c.yaml:4:18"


def test_anchors_aliases_and_merge_keys_keep_the_source_location_of_the_original():
    root, problems = read("a: &x {p: 1, q: 2}\nb: *x\nc:\n  <<: *x\n  q: 3\nd: {<<: [{r: 1}, {r: 2, s: 3}]}\n")
    assert problems == []
    assert root.plain() == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 2}, "c": {"p": 1, "q": 3}, "d": {"r": 1, "s": 3}}
    assert str(root.at(("c", "p")).location) == "c.yaml:1:11"


WRONG = {
    "a:\n\tb: 1": "c.yaml:2:1: Invalid YAML: found character '\\t' that cannot start any token. Indent with spaces, not tabs.",
    "a: b: c": "c.yaml:1:5: Invalid YAML: mapping values are not allowed here. Quote values that contain `: `, and indent "
    "all keys of a section equally.",
    "a: 'x\nb: 1": "c.yaml:2:5: Invalid YAML: while scanning a quoted scalar, found unexpected end of stream.",
    "a: *nope": "c.yaml:1:4: Invalid YAML: found undefined alias 'nope'. Text that starts with `*` must be quoted.",
    "a: 1\n---\nb: 2": "c.yaml:2:1: Invalid YAML: expected a single document in the stream, but found "
    "another document. A config must have one document: remove the second `---`.",
    "a: 1\nb: \x07": "c.yaml:2:4: The character U+0007 is not allowed in YAML: remove it.",
    "a: &x [*x]": "c.yaml:1:4: Invalid YAML: nested more than 50 levels deep (or an alias that contains itself).",
    "a: &x\n  <<: *x": "c.yaml:1:4: Invalid YAML: nested more than 50 levels deep (or an alias that contains itself).",
    "a: !!binary aGk=": "c.yaml:1:4: Invalid YAML: the tag 'binary' is not supported: write the value without it.",
    "a: !!python/object:os.system x": "c.yaml:1:4: Invalid YAML: the tag 'python/object:os.system' is not "
    "supported: write the value without it.",
    "a: !!set {x}": "c.yaml:1:4: Invalid YAML: the tag 'set' is not supported: write the value without it.",
    "a: !!int abc": "c.yaml:1:4: Invalid YAML: 'abc' is not a valid YAML int.",
    "a: {<<: 3}": "c.yaml:1:9: Invalid YAML: `<<` takes a mapping, or a list of mappings.",
    "a: 1\na: 2": "c.yaml:2:1: a: This key is already set at c.yaml:1:1: remove one of the two.",
    "p:\n  q: {r: 1, r: 1}": "c.yaml:2:13: p.q.r: This key is already set at c.yaml:2:7: remove one of the two.",
    "on: 1": "c.yaml:1:1: YAML reads the key 'on' as true: quote it.",
    "p: {3: 1}": "c.yaml:1:5: p: YAML reads the key '3' as 3: quote it.",
    "p: {{a: b}: 1}": "c.yaml:1:5: p: A key must be text, not a list or a mapping. Is a pair of braces missing its quotes?",
    "p: {_override_: 3}": "c.yaml:1:17: p._override_: must be true or false.",
}


@pytest.mark.parametrize("text", WRONG)
def test_invalid_config_text_is_rejected_with_its_line(text):
    assert read(text)[1] == [WRONG[text]]


def test_all_duplicates_are_reported_at_once():
    assert len(read("a: 1\na: 2\nb: {c: 1, c: 2}\na: 3")[1]) == 3


@pytest.mark.parametrize("depth", [60, 500, 20_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_an_error_and_does_not_crash_the_process(depth, brackets):
    inner = "" if brackets == "[]" else "a: "
    text = "a: " + (brackets[0] + inner) * depth + brackets[1] * depth
    assert "nested more than 50 levels deep" in read(text)[1][0]


def test_exponentially_expanding_aliases_are_rejected_early():
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    assert "more than 10000 values" in read(text)[1][0]


def test_an_integer_that_python_refuses_to_read_is_refused():
    assert "is not a valid YAML int" in read("a: " + "9" * 5000)[1][0]


def test_a_text_without_values_is_empty():
    assert read("# nothing\n") == (None, [])


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20_000, "1" + ":59" * 4000])
def test_an_integer_that_python_cannot_print_is_refused_at_its_line(number):
    _, [problem] = read(f"a: 1\nb: {number}\n")
    assert problem.startswith("c.yaml:2:4: ")
    assert "is not a valid YAML int" in problem
