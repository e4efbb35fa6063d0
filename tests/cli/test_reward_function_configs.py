"""Reward functions in configs: `validate` and `validate --deep` report mistakes at their key, with the fix."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from later_rules import report_of

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.loader import load_config

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
FUNCTIONS = """
import torch

def short(completion: str) -> float:
    return -float(len(completion))

def right(completion, expected_answer):
    return completion == expected_answer

def parts(completion):
    return {"length": len(completion)}

def as_text(completion):
    return "good"

def wants_solution(completion, solution):
    return 0.0

def of_a_batch(prompts, completions, **kwargs):
    assert kwargs["expected_answer"]
    return [1.0 if isinstance(completion, FORM) else "no" for completion in completions]

def no_return(completion, expected_answer):
    completion == expected_answer

def broken(completion):
    return 1 / len(completion)

def reads_messages(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

FORM = str
"""
UNIMPORTABLE = {
    "def short(completion)\n    return 1\n": ":1 is not valid Python: expected ':'.",
    "import torch\nlimit = lenght\ndef short(completion):\n    return 1\n": "it raised NameError: name 'lenght' is not ",
    "raise SystemExit(3)\ndef short(completion):\n    return 1\n": "it raised SystemExit: 3 (",
    "import no_package_here\ndef short(completion):\n    return 1\n": "No module named 'no_package_here' (",
}
"""Modules that cannot be imported, and the error."""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Load a config with this `env` section and check it deeply; returns the errors as text."""
    name = f"rewards_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2=", "expected_answer": "3"}\n' * 4)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda env, **train: _check(tmp_path, json.loads(json.dumps(env).replace("MODULE", name)), train)
    sys.modules.pop(name, None)


def _check(folder, env, train):
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"train": {"dataset_name": "jsonl", "path": str(folder / "rows.jsonl"), **train}},
        "env": env,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    try:
        loaded = load_config(path)
        loaded.refuse(report_of(loaded).problems)
    except InvalidConfigError as error:
        return str(error)
    assert loaded.run.env["mine"].name == "function"
    return ""


@pytest.mark.parametrize("source", UNIMPORTABLE)
def test_a_module_that_cannot_be_imported_is_one_error_with_the_line(check, tmp_path, source):
    module = next(tmp_path.glob("rewards_of_*.py"))
    module.write_text(source)
    errors = check({"mine": {"reward_fn": "MODULE.short"}}).splitlines()
    assert [UNIMPORTABLE[source] in error for error in errors] == [True]
    assert "env.mine.reward_fn: " in errors[0]
    assert f"{module}:" in errors[0]


@pytest.mark.parametrize(
    "env",
    [
        {"mine": {"reward_fn": "MODULE.short"}},
        {"mine": {"reward_fn": "MODULE:short", "reward_weights": {"short": 2.0}}},
        {"mine": {"reward_fns": {"right": "MODULE.right", "brief": "MODULE.short"}, "reward_weights": {"brief": 0.1}}},
        {"mine": {"reward_fn": "MODULE.parts", "reward_weights": {"length": 0.1}}},
        {"mine": {"reward_fn": "MODULE.of_a_batch"}},
        {"mine": {"reward_fns": {"none": "MODULE.no_return", "brief": "MODULE.short"}}},
    ],
)
def test_functions_that_accept_the_first_row_are_valid(check, env):
    assert check(env) == ""


ERRORS = {
    "a file": (
        {"reward_fn": "./rewards.py:f"},
        "'./rewards.py:f' is the path of a file",
        "rewards.my_function",
    ),
    "no such module": ({"reward_fn": "no_rewards_here.f"}, "env.mine.reward_fn: cannot import", "no package 'no_rewards_here'"),
    "no such function": ({"reward_fn": "MODULE.shrot"}, "env.mine.reward_fn", "Did you mean 'short'?"),
    "no function": ({"reward_fns": {"a": "MODULE.FORM"}}, "env.mine.reward_fns.a", "is a class, not a function"),
    "a field that the rows lack": ({"reward_fn": "MODULE.wants_solution"}, "env.mine.reward_fn", "requires 'solution'"),
    "a field of the data": (
        {"reward_fn": "MODULE.wants_solution"},
        "in `env_keys` of the dataset, such as `env_keys: [solution]`",
    ),
    "a list of functions": ({"reward_fns": ["MODULE.short"]}, "env.mine.reward_fns: must be a mapping from", "{short: "),
    "messages where there are texts": (
        {"reward_fn": "MODULE.reads_messages"},
        "raised TypeError at ",
        "`completions` were texts; `completion_format: messages` changes that.",
    ),
    "a text as a reward": ({"reward_fn": "MODULE.as_text"}, "returned 'good' (str)", "called with", "rows.jsonl:1 of the data"),
    "None for every row": (
        {"reward_fn": "MODULE.no_return"},
        "env.mine.reward_fn: no_return returned None for the expected answers of the first 4 rows",
        "return a number",
    ),
    "an exception": ({"reward_fns": {"x": "MODULE.broken"}}, "env.mine.reward_fns.x", "raised ZeroDivisionError at ", ".py:"),
    "a weight without a reward": (
        {"reward_fn": "MODULE.short", "reward_weights": {"shrot": 1}},
        "env.mine.reward_weights",
        "Did you mean 'short'?",
    ),
    "a misspelt key": ({"reward_fn": "MODULE.short", "reward_weigths": {}}, "Did you mean 'reward_weights'?"),
    "two forms": ({"reward_fn": "MODULE.short", "reward_fns": {"a": "MODULE.short"}}, "keep one of them"),
    "a function of another environment": ({"name": "math", "reward_fn": "MODULE.short"}, "env.mine", "reward_fn"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_mistakes_are_reported_at_their_line(check, case):
    section, *says = ERRORS[case]
    found = check({"mine": section})
    assert "run.yaml:" in found
    for text in says:
        assert text in found, found


def test_prompts_that_are_messages_are_passed_to_trl_functions_as_messages(check, tmp_path):
    row = {"prompt": [{"role": "user", "content": "1+2="}], "expected_answer": "3"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    found = check({"mine": {"reward_fn": "MODULE.of_a_batch"}}, input_key="prompt")
    assert "returned 'no' (str)" in found
    assert check({"mine": {"reward_fn": "MODULE.of_a_batch", "completion_format": "text"}}, input_key="prompt") == ""


def test_the_example_is_valid(monkeypatch):
    root = MODEL.parents[2]
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    loaded = load_config("examples/reward_functions/train.yaml")
    loaded.refuse(report_of(loaded).problems)
    assert set(loaded.run.env["sums"].functions) == {"exact", "digits"}
