"""`rlcore check env`, `rlcore env play` and `rlcore env rescore` print what they found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_core.errors import UserError, WrongKindError
from rl_core.tools.specs import Tool
from rl_envs.tools.calculator import calculator
from rl_train.workbench.check import _example_calls
from rlcore_cli.main import app


def run(*words, typed=None):
    return CliRunner().invoke(app, list(words), input=typed)


def test_check_env_prints_each_check_and_fails_if_one_does(tmp_path, monkeypatch):
    done = run("check", "env", "guess", "max_guesses=3")
    assert done.exit_code == 0, done.output
    assert "ok      determinism: equal calls" in done.output
    assert "at most 3 turns" in done.output
    few = run("check", "env", "guess", "data.num_samples=12", "--num-rows", "2")
    assert few.output.endswith("note    rows: 2 of 12 rows, --num-rows N for more\n")
    (tmp_path / "random_rewards_here.py").write_text("import random\n\ndef f(completion):\n    return random.random()\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "others.jsonl").write_text('{"text": "x"}\n')
    other = run("check", "env", "random_rewards_here.f", "--rows", str(tmp_path / "others.jsonl"))
    assert "; --config FILE maps the fields" in str(other.exception)
    done = run("check", "env", "random_rewards_here.f", "--rows", str(tmp_path / "rows.jsonl"), "--json")
    assert done.exit_code == 1
    assert "rows" not in [result["name"] for result in json.loads(done.output)]
    assert {"name": "determinism", "status": "failed"}.items() <= json.loads(done.output)[2 + 1].items()


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["--script", "answers.txt"], None),
        (["--player", "person"], "1\n9\n"),
    ],
)
def test_env_play_prints_turns_messages_and_rewards(tmp_path, monkeypatch, words, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.txt").write_text("1\n9\n")
    done = run("env", "play", "guess", "data.lowest=5", "data.highest=5", *words, typed=typed)
    assert done.exit_code == 0, done.output
    for text in ("from 5 to 5", "turn 1: reward 0; parsed answer '1'", "environment: higher", "environment: lower"):
        assert text in done.output
    assert "total reward 0 after 2 turns" in done.output


def test_wrong_options_of_env_play_are_refused():
    for words, says in (
        (["--player", "script"], "belong together"),
        (["--row", "5000"], "there are only 1024 rows"),
        (["--script", "no_such_file.txt"], "--script no_such_file.txt cannot be read"),
    ):
        done = run("env", "play", "guess", *words)
        assert done.exit_code != 0
        assert says in str(done.exception)


def test_env_play_plays_environments_with_tools(tmp_path):
    rows, script = tmp_path / "rows.jsonl", tmp_path / "answers.txt"
    rows.write_text('{"prompt": "2+2?", "expected_answer": "4"}\n')
    script.write_text(
        'I use it.\\n/call calculator {"expression": "2+2"}\n/call calculator 2+2\n/call calculator [1]\n\\boxed{4}\n'
    )
    done = run("env", "play", "tools", "--rows", str(rows), "--script", str(script))
    assert done.exit_code == 0, done.output
    assert "tool: 4\n" in done.output
    assert "tool: Error: the tool call is not valid JSON: Extra data" in done.output
    assert "tool: Error: the arguments are [1]: expected a JSON object" in done.output
    assert "total reward 1 after 4 turns" in done.output


def test_a_parameter_that_a_schema_requires_but_does_not_declare_has_no_example():
    tool = Tool.of(calculator)
    function = {**tool.spec["function"], "parameters": {"type": "object", "required": ["text"]}}
    assert _example_calls(replace(tool, spec={**tool.spec, "function": function})) == []


def test_check_env_calls_tools_and_names_the_line_of_one_that_always_raises(tmp_path, monkeypatch):
    module = (
        "from typing import Literal\n"
        "from rl_core.environments import Score\n"
        "from rl_envs.tools.environment import ToolsEnvironment\n\n"
        "def works(kind: Literal['a', 'b'], size: int = 3) -> int:\n    return size\n\n"
        "def unknown(text: str) -> str:\n    return text\n\n"
        "def buggy(kind: Literal['a']) -> int:\n    return kind + 1\n"
    )
    (tmp_path / "tools_with_a_bug.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?", "expected_answer": "4"}\n')
    given = ("check", "env", "tools", "--rows", str(rows))
    done = run(*given, "tools=[tools_with_a_bug.works, tools_with_a_bug.unknown]")
    assert "ok      tools: called, with the number of calls: works (1); not called, because neither rows nor" in done.output
    assert done.output.count("have arguments: unknown") == 1
    done = run(*given, "tools=[tools_with_a_bug.buggy]")
    assert done.exit_code == 1
    assert (
        f"the tool buggy raised TypeError at {tmp_path}/tools_with_a_bug.py:12 in all 1 calls: Error: TypeError" in done.output
    )


def test_check_env_refuses_a_class_that_is_not_an_environment(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?", "expected_answer": "4"}\n')
    done = run("check", "env", "fractions.Fraction", "--rows", str(rows))
    assert isinstance(done.exception, WrongKindError)
    assert "fractions.Fraction is not a subclass of" in str(done.exception)


@pytest.mark.parametrize("words", [("check", "env"), ("env", "play")])
def test_an_interpreter_that_does_not_exist_is_refused(words):
    done = run(*words, "guess", "python=/opt/other/bin/python")
    assert isinstance(done.exception, UserError), done.output
    assert (done.exception.exit_code, done.exception.key) == (2, "env.guess.python")
    assert "/opt/other/bin/python does not exist" in str(done.exception)


def test_check_env_names_the_special_tokens_that_rewards_do_not_see():
    config = Path(__file__).parents[2] / "examples" / "reward_functions" / "train.yaml"

    done = run("check", "env", "sums", "--config", str(config), "policy.tokenizer.visible_special_tokens=none")
    assert "note    special tokens: rewards, tools and logs do not see <pad>, <eos>, <unk>" in done.output, done.output
    assert "visible_special_tokens: none)" in done.output
    done = run("check", "env", "sums", "--config", str(config), "policy.tokenizer.visible_special_tokens=all")
    assert "rewards, tools and logs see all special tokens (policy.tokenizer.visible_special_tokens: all)" in done.output
