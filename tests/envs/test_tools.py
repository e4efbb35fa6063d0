"""The environment `tools`: a calculator that runs no code, functions by path, and a reward for the final answer."""

import sys

import pytest
from environment_steps import step_checked

from rl_core.errors import ConfigError
from rl_core.testing.outputs.environment import metrics_checked
from rl_envs.config import ToolsEnvironmentConfig
from rl_envs.tools.calculator import calculator, evaluate
from rl_envs.tools.environment import ToolsEnvironment


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12345 * 6789", "83810205"),
        ("2 + 3 * (4 - 1) ** 2", "29"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2^10", "1024"),
        ("1,234 + 1", "1235"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("sqrt(2)", "1.41421356237"),
        ("max(1, 200, 3)", "200"),
        ("round(2.567, 1)", "2.6"),
        ("2 * pi", "6.28318530718"),
        ("1e-3", "0.001"),
    ],
)
def test_the_calculator_evaluates_arithmetic(expression, value):
    assert calculator(expression) == value


def test_whole_numbers_of_the_calculator_are_exact_at_any_allowed_size():
    assert evaluate("10 ** 5000") == 10**5000
    assert calculator("10 ** 5000 + 7") == "1" + "0" * 4999 + "7"
    assert calculator("-(10 ** 5000)") == "-1" + "0" * 5000


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("__import__('os').system('true')", "is not arithmetic"),
        ("(1).__class__", "is not arithmetic"),
        ("[1] * 9", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("x = 1", "is not an arithmetic expression"),
        ("2 +", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("(" * 300 + "1" + ")" * 99, "is not an arithmetic expression"),
        ("9" * 401, "401 characters"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 5000 * 10 ** 5000", "too large"),
        ("exp(1000)", "too large"),
        ("2.0 ** 5000", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", ""),
        ("round(1, 2, 3)", "argument"),
        ("round(1, 0.5)", ""),
        ("1e999", "not a finite number"),
        ("1 @ 2", "is not arithmetic"),
    ],
)
def test_the_calculator_refuses_everything_else(expression, says):
    with pytest.raises(ValueError, match="(?i)" + says):
        evaluate(expression)


def test_rounding_to_very_many_digits_takes_no_time():
    assert calculator("round(1, -10**9)") == "0"
    assert calculator("round(2.5, 10**9) + round(7, 10**9) + round(-10**5000, -10**9)") == "9.5"
    assert evaluate("round(2.6)") == 3


def test_division_by_zero_is_an_error():
    with pytest.raises(ZeroDivisionError):
        evaluate("1 / 0")


def called(expression, number=0):
    function = {"name": "calculator", "arguments": {"expression": expression}}
    call = {"id": f"call{number:05}", "type": "function", "function": function}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def said(text):
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


@pytest.fixture
def made():
    """Environments that end with the test."""
    environments = []

    def make(**config):
        environments.append(ToolsEnvironment(config))
        return environments[-1]

    yield make
    for environment in environments:
        environment.shutdown()


def test_the_final_answer_is_compared_like_mathematics_and_calls_are_counted(made):
    environment = made(max_tool_turns=1, invalid_call_penalty=0.5)
    info = {"expected_answer": "1/2"}
    first = step_checked(environment, "tools", [called("1/2"), called("1/0"), said(r"\boxed{0.5}")], [info] * 3)
    assert [each[0]["content"] if isinstance(each, list) else None for each in first.observations[:2]] == [
        "0.5",
        "Error: ZeroDivisionError: division by zero",
    ]
    assert first.terminateds.tolist() == [False, False, True]
    assert first.rewards["reward"].tolist() == [0.0, 0.0, 1.0]
    assert first.rewards["invalid_calls"].tolist() == [0.0, -0.5, 0.0]
    last = step_checked(environment, "tools", [said(r"\boxed{\frac{1}{2}}"), called("1/2")], first.metadata[:2])
    assert (last.terminateds.tolist(), last.rewards.tolist()) == ([True, True], [1.0, 0.0])
    rows = [*last.metadata, first.metadata[2], {"expected_answer": "3"}]
    metrics = metrics_checked(environment, "tools", {"extra_env_info": rows})
    assert metrics["accuracy"] == 0.5
    assert metrics["answered_frac"] == 0.5
    assert (metrics["tool_calls"], metrics["calls_exception"]) == (0.5, 1)


def test_an_answer_next_to_a_call_after_the_last_turn_counts_neither_as_reward_nor_as_correct(made):
    environment = made(max_tool_turns=1)
    first = step_checked(environment, "tools", [called("1/2")], [{"expected_answer": "1/2"}])
    both = [[{**message, "content": r"\boxed{0.5}"} for message in called("1/2")]]
    last = step_checked(environment, "tools", both, first.metadata)
    assert (last.terminateds.tolist(), last.rewards.tolist(), last.answers) == ([True], [0.0], [None])
    metrics = metrics_checked(environment, "tools", {"extra_env_info": last.metadata})
    assert (metrics["accuracy"], metrics["answered_frac"]) == (0.0, 0.0)


def test_functions_by_path_become_tools(tmp_path, monkeypatch, made):
    (tmp_path / "my_own_tools.py").write_text('def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n')
    monkeypatch.syspath_prepend(tmp_path)
    environment = made(tools=["calculator", "my_own_tools:shout"])
    offered = ToolsEnvironment.offered_tools(environment.config)
    assert [spec["function"]["name"] for spec in offered] == ["calculator", "shout"]
    call = {"id": "a", "type": "function", "function": {"name": "shout", "arguments": {"text": "hey"}}}
    log = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert step_checked(environment, "tools", [log], [{"expected_answer": "1"}]).observations[0][0]["content"] == "HEY"
    sys.modules.pop("my_own_tools", None)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tools": ["calculater"]}, "unknown tool 'calculater'. Did you mean 'calculator'?"),
        ({"tools": []}, "tools"),
        ({"tools": ["calculator", "calculator"]}, "two tools with the name 'calculator'"),
        ({"tools": ["rl_core.errors.NoTool"]}, "NoTool"),
        ({"sandbox": {"timeout_s": 3}}, "sandbox applies to the tool `python`, which is not in `tools`"),
    ],
)
def test_wrong_configs_are_refused(config, says):
    with pytest.raises(ConfigError) as error:
        ToolsEnvironment(config)
    assert says in str(error.value)


def test_the_environment_declares_its_turns():
    assert (ToolsEnvironmentConfig().turns_needed, ToolsEnvironmentConfig().min_turns) == (5, 2)


def test_the_sandbox_must_stop_code_before_the_call_is_given_up():
    with pytest.raises(ConfigError, match=r"sandbox.timeout_s \(30\) must be below call_timeout_s \(30\)"):
        ToolsEnvironment({"tools": ["python"], "sandbox": {"timeout_s": 30}})
