"""Prompt configs with few-shot examples: named lists, own files, and the nearest rows without the row itself."""

import json
import logging
import os
import subprocess
import sys

import pytest

from rl_core.errors import DataError
from rl_train.data.dataset_config import JsonlDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.prompts import templates
from rl_train.prompts.prompt_files import packaged_examples, packaged_prompts
from rl_train.prompts.templates import load_prompt

NEAREST = """
few_shot_examples:
  template: "{problem} -> {solution}\\n"
  retrieval_field: problem
  retrieval_file: pool.jsonl
  retrieved_few_shots: 2
%s
user: "{examples}{problem}"
"""
POOL = [
    {"problem": "How many apples are in three bags of two apples?", "solution": "6"},
    {"problem": "What is 2 + 2?", "solution": "4"},
    {"problem": "How many pears are in three bags of five pears?", "solution": "15"},
    {"problem": "Name the capital of France.", "solution": "Paris"},
    {"problem": "How many plums are in four bags?", "solution": "unknown"},
]


@pytest.fixture
def nearest(tmp_path):
    """Writes a prompt config that searches a pool, and returns its template."""

    def build(pool=POOL, extra=""):
        (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pool))
        (tmp_path / "p.yaml").write_text(NEAREST % extra)
        return load_prompt(tmp_path / "p.yaml")

    return build


def text(template, **row):
    return template.fill(row)[-1]["content"]


def test_named_examples_are_written_between_prefix_and_suffix(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"problem": "1+1", "solution": "2"}\n\n{"problem": "1+2", "solution": 3}\n')
    (tmp_path / "p.yaml").write_text(
        'few_shot_examples: {prefix: "<", template: "{problem}={solution};", suffix: ">", examples_type: own.jsonl}\n'
        'system: You know {topic}.\nuser: "{examples}{problem}"\n'
    )
    template = load_prompt(tmp_path / "p.yaml")
    assert template.fill({"problem": "6*7", "topic": "sums"}) == [
        {"role": "system", "content": "You know sums."},
        {"role": "user", "content": "<1+1=2;1+2=3;>6*7"},
    ]
    assert template.names == {"problem", "topic"}
    (tmp_path / "p.yaml").write_text(
        'few_shot_examples: {template: "{q}!", examples: [{q: a}, {q: b}]}\nuser: "{examples}{problem}"\n'
    )
    assert text(load_prompt(tmp_path / "p.yaml"), problem="c") == "a!b!c"


def test_without_chosen_examples_prefix_and_suffix_are_omitted():
    assert text(load_prompt("generic/math"), problem="2+2").endswith("\\boxed{}.\n\n2+2")


@pytest.mark.parametrize("name", ["generic/cot", "generic/default", "generic/code", "weather/prediction"])
def test_the_packaged_prompts_take_a_question(name):
    assert "What now?" in text(load_prompt(name), question="What now?")


@pytest.mark.parametrize(
    ("prompt", "examples"),
    [("generic/math", "math_worked"), ("generic/code", "code_stdio"), ("weather/prediction", "weather_days")],
)
def test_each_packaged_list_of_examples_fits_its_prompt(prompt, examples):
    plain, shown = (text(load_prompt(prompt, kind), problem="P", question="P") for kind in (None, examples))
    assert len(shown) > len(plain) + 300
    assert examples in packaged_examples()
    assert prompt in packaged_prompts()


def test_a_fixed_list_leaves_out_the_question_of_the_row():
    shown = text(load_prompt("generic/math", "math_worked"), problem="find the value of x if 3x - 7 = 20")
    assert "x = 9" not in shown
    assert "pencils" in shown


def test_the_nearest_examples_are_chosen_by_words_and_the_nearest_is_last(nearest):
    shown = text(nearest(), problem="How many pears are in two bags of five pears?")
    assert shown == (
        "How many apples are in three bags of two apples? -> 6\nHow many pears are in three bags of five pears? -> 15\n"
        "How many pears are in two bags of five pears?"
    )


@pytest.mark.parametrize(
    "written",
    ["What is 2 + 2?", "what is 2+2", "  What is\n$2 + 2$ ?", "What is \uff12 + 2\u200b?", "\u201cWhat is 2+2\u201d"],
)
def test_the_row_itself_is_never_one_of_its_examples(nearest, written):
    template = nearest([*POOL, {"problem": "WHAT IS 2 +  2", "solution": "4!"}])
    shown = text(template, problem=written)
    assert "-> 4" not in shown
    assert shown.count("->") == 2


def test_the_row_itself_is_left_out_if_examples_are_searched_by_another_field(tmp_path):
    pool = [{"q": "2+2?", "proof": "count two and two"}, {"q": "3+3?", "proof": "count three and three"}]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pool))
    (tmp_path / "p.yaml").write_text(
        'few_shot_examples: {template: "{proof};", retrieval_field: proof, retrieval_file: pool.jsonl}\n'
        'user: "{examples}{question}"\n'
    )
    assert text(load_prompt(tmp_path / "p.yaml"), question="2 + 2?", proof="count them") == "count three and three;2 + 2?"


def test_minus_and_plus_are_different_questions(nearest):
    shown = text(nearest([{"problem": "2-2", "solution": "0"}, {"problem": "2+2", "solution": "4"}]), problem="2+2")
    assert shown == "2-2 -> 0\n2+2"


def test_repeated_and_too_long_examples_are_left_out(nearest, caplog):
    pool = [{"problem": "red bags", "solution": "1"}, {"problem": "Red bags!?", "solution": "2"}, *POOL]
    limit = "  max_retrieved_chars: 3\n  max_retrieved_chars_field: solution"
    assert "2\n" not in text(nearest(pool), problem="red bags of plums")
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        shown = text(nearest(POOL, limit + "\n  retrieved_entries: 1"), problem="plums in four bags")
    assert shown == "plums in four bags"
    assert "has only 0 few-shot examples, not 2" in caplog.text


def test_equal_scores_keep_the_order_of_the_file_in_every_process(nearest, tmp_path):
    pool = [{"problem": f"count the {name}", "solution": str(i)} for i, name in enumerate(["cats", "dogs", "cows", "hens"])]
    expected = text(nearest(pool), problem="count the owls")
    assert expected == "count the dogs -> 1\ncount the cats -> 0\ncount the owls"
    program = (
        "from rl_train.prompts.templates import load_prompt\n"
        f"print(load_prompt({str(tmp_path / 'p.yaml')!r}).fill({{'problem': 'count the owls'}})[0]['content'], end='')"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def test_a_row_without_known_words_gets_the_first_examples(nearest):
    assert text(nearest(), problem="xyzzy").startswith("What is 2 + 2? -> 4\nHow many apples")
    assert templates.Bm25(["", "?"]).ranked("a") == [0, 1]
    assert templates.Bm25(["", ""]).ranked("a") == [0, 1]


def test_a_missing_bm25s_names_the_command_that_installs_it(nearest, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(DataError, match=r"needs the package bm25s: pip install 'rl-train\[prompts\]'"):
        templates.Bm25(["a"])
    monkeypatch.setattr("rl_train.prompts.prompt_files.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"p\.yaml:5:19: few_shot_examples\.retrieval_file: searching .* 'rl-train\[prompts\]'"):
        nearest()


def test_a_dataset_can_search_the_file_that_it_reads(tmp_path):
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in POOL))
    (tmp_path / "p.yaml").write_text(NEAREST % "")
    config = JsonlDatasetConfig(
        path=tmp_path / "pool.jsonl", input_key="problem", output_key="solution", prompt=str(tmp_path / "p.yaml")
    )
    prompts = [record["messages"][0]["content"] for record in RecordDataset(config)]
    for row, prompt in zip(POOL, prompts, strict=True):
        assert f"{row['problem']} -> " not in prompt
        assert prompt.endswith(row["problem"])
        assert prompt.count(" -> ") == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("userr: a", r"p\.yaml:1:1: userr: PromptFile has no key 'userr'\. Did you mean 'user'\?"),
        ("user: a\nfew_shot_examples: {templat: b}", r"p\.yaml:2:21: few_shot_examples\.templat: .*Did you mean 'template'\?"),
        ("user: a\ncode_tags: qwen", r"p\.yaml:2:1: code_tags: is not supported: code in few-shot examples"),
        ("user: '{examples}{q}'", r"p\.yaml:1:7: user: \{examples\} cannot be filled: add the section"),
        ("user: a\nsystem: '{examples}'", r"p\.yaml:2:9: system: \{examples\} can only be used in the user message"),
        ("user: '{q'", r"p\.yaml:1:7: user: .*write \{\{ and \}\} for literal braces"),
        ("user: a\nfew_shot_examples: {template: b, examples: [{c: d}]}", "the examples would have no effect"),
        ("user: '{examples}'\nfew_shot_examples: {examples: [{c: d}]}", r"2:1: few_shot_examples\.template is required"),
        ("user: '{examples}'\nfew_shot_examples: {template: '{}', examples: [{c: d}]}", r"template: \{\} cannot be filled"),
        (
            "user: '{examples}'\nfew_shot_examples: {template: '{anser}', examples: [{answer: d}]}",
            r"examples: example 1: the field 'anser' is missing: .*Did you mean 'answer'\?",
        ),
        (
            "user: '{examples}'\nfew_shot_examples: {template: '{a}', examples_type: math_work}",
            r"2:53: few_shot_examples\.examples_type: there is neither a file .* Did you mean 'math_worked'\?",
        ),
        (
            "user: '{examples}'\nfew_shot_examples: {template: '{a}', retrieval_field: a}",
            "few_shot_examples: retrieval_field and retrieval_file must be set together",
        ),
        (
            "user: '{examples}'\nfew_shot_examples: {template: '{a}', retrieval_field: a, retrieval_file: rows.jsonl}",
            "few_shot_examples.retrieval_file: the examples .*rows.jsonl cannot be read: .*No such file",
        ),
        (
            "user: '{examples}'\nfew_shot_examples: {template: b, examples: [{a: b}], examples_type: math_worked}",
            "examples_type and examples both select the examples",
        ),
        ("user: '{examples}'\nfew_shot_examples: {randomize_retrieved_entries: true}", "must be false: the prompt of a row"),
    ],
)
def test_an_invalid_prompt_config_is_refused_with_line_and_suggestion(tmp_path, content, said):
    (tmp_path / "p.yaml").write_text(content)
    with pytest.raises(DataError, match=said):
        load_prompt(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("content", "said"),
    [("- {a: b}\n- c", "e.yaml:2:3: expected an example"), ("a: b", "expected a list"), ("[]", "has no examples")],
)
def test_an_invalid_list_of_examples_is_refused(tmp_path, content, said):
    (tmp_path / "e.yaml").write_text(content)
    with pytest.raises(DataError, match=said):
        load_prompt("generic/math", str(tmp_path / "e.yaml"))


def test_a_placeholder_that_the_row_cannot_fill_is_reported_with_its_line(tmp_path):
    (tmp_path / "p.yaml").write_text("user: |-\n  Solve it.\n  {problm}\n")
    with pytest.raises(DataError, match=r"p\.yaml:3 uses \{problm\}, but .* it has \['problem'\]\. Did you mean 'problem'\?"):
        load_prompt(tmp_path / "p.yaml").fill({"problem": "1"})
    with pytest.raises(DataError, match="the record has a field 'examples', but generic/math uses"):
        load_prompt("generic/math").fill({"problem": "1", "examples": "2"})


def test_examples_that_do_not_fit_the_prompt_are_refused():
    with pytest.raises(DataError, match=r"examples_type is 'math_worked', but this prompt config has no `few_shot_examples`"):
        load_prompt("generic/question", "math_worked")
    with pytest.raises(DataError, match="the field 'problem' is missing: the example has"):
        load_prompt("generic/math", "code_stdio")
