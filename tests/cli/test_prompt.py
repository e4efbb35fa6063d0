"""`rlcore prompt`: the packaged prompt configs, and the messages of a filled one."""

import sys
from pathlib import Path

import pytest

from rl_train.prompts.prompt_files import packaged_prompts
from rlcore_cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rlcore(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlcore", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def test_the_list_has_every_prompt_config_and_its_fields(rlcore):
    _, out, _ = rlcore("prompt", "list")
    assert all(f"  {name} " in out for name in packaged_prompts())
    assert {"generic/default", "generic/math", "generic/code", "weather/prediction"} <= set(packaged_prompts())
    assert "generic/math         fields: problem; examples: problem, solution" in out
    assert "math_worked          4 examples; fields: problem, solution" in out


def test_show_prints_the_filled_messages(rlcore):
    code, out, _ = rlcore("prompt", "show", "generic/math", "--input", '{"problem": "2+2"}')
    assert code == 0
    assert out.startswith("[user]\nSolve the following math problem.")
    assert out.endswith("\\boxed{}.\n\n2+2\n\n")
    _, out, _ = rlcore("prompt", "show", "generic/cot", "--input", '{"question": "2+2"}')
    assert out.startswith("[system]\nYou are a careful assistant who thinks step by step.\n\n[user]\n2+2\n")


def test_show_prints_few_shot_examples_and_keeps_placeholders_without_input(rlcore):
    _, out, _ = rlcore("prompt", "show", "generic/math", "--examples-type", "math_worked")
    assert out.count("\nProblem: ") == 4
    assert out.endswith("Now solve this problem.\n\n{problem}\n\n")


def test_show_prints_the_tokens_of_a_model(rlcore):
    model = str(ROOT / "examples" / "addition" / "model")
    _, out, _ = rlcore("prompt", "show", "generic/question", "--input", '{"question": "12+3="}', "--model", model)
    assert "[rendered by the chat template of" in out
    assert "\n12+3=\n\n[5 tokens]\n" in out
    assert len(out.splitlines()[-1].split()) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generic/mth",), "packaged prompt 'generic/mth'. Did you mean 'generic/math'?"),
        (("generic/math", "--input", "["), "--input is invalid JSON"),
        (("generic/math", "--input", "[1]"), "--input must be a JSON object"),
        (
            ("generic/math", "--input", '{"problm": "1"}'),
            "generic/math:9 uses {problem}, but the record does not",
        ),
        (("generic/math", "--examples-type", "math"), "there is neither a file nor a packaged list of examples 'math'"),
    ],
)
def test_show_refuses_what_it_cannot_fill(rlcore, arguments, said):
    code, _, err = rlcore("prompt", "show", *arguments)
    assert code == 2
    assert said in err
