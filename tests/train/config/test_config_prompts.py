"""Prompt configs and few-shot examples of a config file are checked by `rlcore validate`."""

import pytest

ROWS = '{"question": "1+1", "expected_answer": "2"}\n'


@pytest.fixture
def with_data(files, good):
    """The errors of a config with a JSON Lines dataset, further keys of it, and a section `data.prompt`."""
    files.write(ROWS, "rows.jsonl")

    def config(own="", shared=""):
        train = f"  train: {{dataset_name: jsonl, path: rows.jsonl{', ' if own else ''}{own}}}"
        return good.replace("  train: {dataset_name: arithmetic}", f"{train}\n  prompt: {{{shared}}}")

    return config


def test_examples_by_name_and_by_path_are_valid(files, with_data):
    files.write("- {question: 2+2, answer: 4}\n", "mine.yaml")
    shared = "prompt_config: generic/default, examples_type: mine.yaml"
    loaded = files.load(with_data(shared=shared))
    assert loaded.run.data.prompt.examples_type == str(files.folder / "mine.yaml")
    assert files.load(with_data("prompt: generic/math, examples_type: math_worked")).run
    assert files.load(with_data("examples_type: mine.yaml", "prompt_config: generic/default")).run
    assert files.load(with_data(shared="prompt_config: generic/math, examples_type: null")).run


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        (
            "",
            "prompt_config: generic/math, examples_type: math_work",
            "config.yaml:11:56: data.prompt.examples_type: generic/math:3:3: few_shot_examples.examples_type: there is neither",
        ),
        (
            "prompt: generic/math, examples_type: math_work",
            "",
            "config.yaml:10:87: data.train.examples_type: generic/math:3:3: few_shot_examples.examples_type: there is neither",
        ),
        ("examples_type: math_worked", "prompt_config: generic/question", "data.train.examples_type: generic/question"),
        ("examples_type: math_worked", "", "data.train.examples_type: has no effect without a prompt config"),
        (
            "prompt: generic/math",
            "examples_type: math_work",
            "data.train.prompt: generic/math:3:3: few_shot_examples.",
        ),
        ("", "examples_type: math_worked", "data.prompt.examples_type: has no effect without a prompt config"),
    ],
)
def test_examples_that_do_not_exist_or_do_not_fit_are_refused(files, with_data, own, shared, expected):
    [error] = files.errors(with_data(own, shared))
    assert expected in error


def test_the_prompts_of_the_training_data_have_no_examples_without_a_prompt_config(files, with_data):
    mix = "mix: {{a: {{{0}, prompt: generic/math}}, b: {{{0}}}}}".format("dataset_name: jsonl, path: rows.jsonl")
    config = with_data(shared="examples_type: math_worked, system_prompt: Be brief.")
    data = files.load(config.replace("train: {dataset_name: jsonl, path: rows.jsonl}", mix)).run.data
    found = [(prompt.prompt_config, prompt.system_prompt, prompt.examples_type) for prompt in data.training_prompts()]
    assert found == [("generic/math", "Be brief.", "math_worked"), (None, "Be brief.", None)]


@pytest.mark.parametrize("key", ["prompt_config", "prompt"])
def test_an_invalid_prompt_config_is_reported_at_its_key_with_its_own_line(files, with_data, key):
    files.write("user: '{question}'\nsytem: a\n", "p.yaml")
    own, shared = ("prompt: p.yaml", "") if key == "prompt" else ("", "prompt_config: p.yaml")
    [error] = files.errors(with_data(own, shared))
    at = "data.train.prompt" if key == "prompt" else "data.prompt.prompt_config"
    assert f"{at}: p.yaml:2:1: sytem: PromptFile has no key 'sytem'. Did you mean 'system'?" in error


def test_a_placeholder_that_the_first_row_cannot_fill_is_refused(files, with_data):
    files.write("user: |-\n  {questn}\n  {expected_answer}\n", "p.yaml")
    [error] = files.errors(with_data(shared="prompt_config: p.yaml"))
    assert "data.train.path: rows.jsonl:1: p.yaml:2 uses {questn}, but the record does not have this field" in error
    assert "Did you mean 'question'?" in error


def test_the_search_for_nearest_examples_is_checked_without_reading_the_whole_file(files, with_data):
    files.write(ROWS + "not JSON\n", "pool.jsonl")
    prompt = (
        'few_shot_examples: {template: "{question}", retrieval_field: %s, retrieval_file: pool.jsonl}\n'
        'user: "{examples}{question}"\n'
    )
    files.write(prompt % "question", "p.yaml")
    assert files.load(with_data(shared="prompt_config: p.yaml")).run
    files.write(prompt % "problem", "p.yaml")
    [error] = files.errors(with_data(shared="prompt_config: p.yaml"))
    assert "p.yaml:1:87: few_shot_examples.retrieval_file: example 1: the field 'problem' is missing" in error
