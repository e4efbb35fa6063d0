"""Environments with tools: calls run concurrently, failures are errors for the model, and answers are scored at the end."""

import asyncio
import threading

import pytest
import torch
from environment_steps import step_checked

from rl_core.errors import ConfigError
from rl_core.interfaces import EnvironmentReturn
from rl_core.testing.outputs.environment import metrics_checked
from rl_core.tools import Tool, ToolEnvironment
from rl_core.tools.runner import CallProblem, CallRunner, ToolUnavailableError, current_session


def double(x: int) -> int:
    """Doubles a number."""
    return 2 * x


def echo(text: str) -> dict:
    return {"text": text, "ok": True}


def fails(x: int) -> int:
    raise KeyError("no such thing")


def leaves() -> str:
    raise SystemExit(3)


def half() -> str:
    return "\ud83d!"


def nothing() -> None:
    return None


async def slowly(x: int) -> int:
    await asyncio.sleep(0)
    return x


FUNCTIONS = (double, echo, fails, leaves, half, nothing, slowly)


def call(name, number=0, **arguments):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def runner(*functions, **options):
    tools = {tool.name: tool for tool in map(Tool.of, functions or FUNCTIONS)}
    return CallRunner(tools=tools, **{"timeout_s": 60.0, "max_concurrent": 4, "max_chars": 40, **options})


@pytest.mark.parametrize(
    ("made", "content", "problem"),
    [
        (call("double", x="4"), "8", None),
        (call("slowly", x=4), "4", None),
        (call("echo", text="é"), '{"text":"é","ok":true}', None),
        (call("nothing"), "null", None),
        (call("half"), "?!", None),
        (call("echo", text="a" * 60), '{"text":"' + "a" * 31 + "... (cut: 81 characters)", None),
        (call("treble", x=1), "Error: there is no tool 'treble'. Available tools: double, echo", CallProblem.UNKNOWN_TOOL),
        (call("double", y=1), "Error: wrong arguments of double: x: Fie", CallProblem.WRONG_ARGUMENTS),
        (call("fails", x=1), "Error: KeyError: 'no such thing'", CallProblem.EXCEPTION),
        (call("leaves"), "Error: SystemExit: 3", CallProblem.EXCEPTION),
        ({**call(""), "error": "not JSON"}, "Error: not JSON", CallProblem.MALFORMED),
    ],
)
def test_every_call_has_a_result_that_the_model_can_read(made, content, problem):
    [result] = runner().run([made])
    assert result.content.startswith(content)
    assert result.problem is problem


def test_calls_run_at_the_same_time_and_results_keep_their_order():
    both = threading.Barrier(2, timeout=60)

    def meets(x: int) -> int:
        both.wait()
        return x

    async def runs_a_loop():
        return runner(meets).run([call("meets", x=1), call("meets", x=2)])

    assert [result.content for result in runner(meets).run([call("meets", x=1), call("meets", x=2)])] == ["1", "2"]
    assert [result.content for result in asyncio.run(runs_a_loop())] == ["1", "2"]


def test_no_more_calls_run_at_the_same_time_than_allowed():
    running, most = [], []

    def counts(x: int) -> int:
        running.append(x)
        most.append(len(running))
        running.remove(x)
        return x

    results = runner(counts, max_concurrent=1).run([call("counts", x=x) for x in range(20)])
    assert [result.content for result in results] == [str(x) for x in range(20)]
    assert max(most) == 1


def test_a_call_that_does_not_finish_gives_an_error_while_others_finish():
    never = threading.Event()

    def waits() -> None:
        never.wait()

    async def sleeps() -> None:
        await asyncio.Event().wait()

    results = runner(waits, sleeps, double, timeout_s=2.0).run([call("waits"), call("sleeps"), call("double", x=1)])
    never.set()
    assert [result.problem for result in results] == [CallProblem.TIMEOUT, CallProblem.TIMEOUT, None]
    assert results[0].content == "Error: waits did not finish within 2 seconds"


def test_many_slow_calls_together_reach_a_limit_before_the_timeout_of_the_step():
    """The step would fail otherwise, which is not scored, although the model made the calls."""
    started = []

    async def sleeps(x: int) -> None:
        started.append(x)
        await asyncio.Event().wait()

    made = [call("double", x=1), *(call("sleeps", x=x) for x in range(50))]
    results = runner(double, sleeps, max_concurrent=2, total_s=2.0).run(made)
    assert [result.problem for result in results] == [None] + [CallProblem.TIMEOUT] * 50
    assert results[-1].content == "Error: sleeps did not finish, because the calls together took more than 2 seconds"
    assert len(started) <= 2
    assert Answers({"step_timeout_s": 20})._runner.total_s == 10.0


class Answers(ToolEnvironment):
    """Right if the last message is the expected text."""

    functions = FUNCTIONS

    def finish(self, message_log_batch, metadata):
        right = [float(log[-1]["content"] == info["expected"]) for log, info in zip(message_log_batch, metadata, strict=True)]
        n = len(right)
        ends = EnvironmentReturn([None] * n, metadata, [None] * n, torch.tensor(right), torch.ones(n))
        return ends._replace(answers=[log[-1]["content"] for log in message_log_batch])


def asks(*calls, content=""):
    made = {"tool_calls": list(calls)} if calls else {}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **made}]


def test_rows_with_calls_read_their_results_and_rows_without_are_scored():
    environment = Answers({"invalid_call_penalty": 0.25})
    logs = [asks(call("double", 0, x=2), call("treble", 1)), asks(content="4"), asks(content="5"), asks(call("double", 2, x=1))]
    found = step_checked(environment, "t", logs, [{"expected": "4"}] * 4)
    assert found.terminateds.tolist() == [False, True, True, False]
    assert {name: values.tolist() for name, values in found.rewards.items()} == {
        "invalid_calls": [-0.25, 0.0, 0.0, 0.0],
        "reward": [0.0, 1.0, 0.0, 0.0],
    }
    assert found.answers == [None, "4", "5", None]
    first, second = found.observations[0]
    assert first == {"role": "tool", "content": "4", "tool_call_id": "call00000", "name": "double"}
    assert (second["tool_call_id"], second["name"]) == ("call00001", "treble")
    assert found.observations[3] == [{"role": "tool", "content": "2", "tool_call_id": "call00002", "name": "double"}]
    assert found.metadata[1]["expected"] == "4"


def test_the_state_counts_calls_over_turns_and_appears_in_the_metrics():
    environment = Answers()
    metadata = [{"expected": "4"}, {"expected": "4"}]
    for logs in ([asks(call("double", x=2), call("fails", 1, x=1))] * 2, [asks(call("double", x=2)), asks(content="4")]):
        metadata = step_checked(environment, "t", logs, metadata).metadata
    assert metadata[0]["tool_use"] == {"turns": 2, "calls": 3, "problems": {"exception": 1}}
    assert metadata[1]["tool_use"] == {"turns": 1, "calls": 2, "problems": {"exception": 1}}
    metrics = metrics_checked(environment, "t", {"extra_env_info": [*metadata, {"expected": "4"}, None]})
    assert metrics["tool_calls"] == 5 / 4
    assert metrics["tool_use_frac"] == 0.5
    assert metrics["invalid_call_frac"] == 2 / 5
    assert (metrics["calls_exception"], metrics["calls_timeout"]) == (2, 0)


def test_calls_after_the_last_tool_turn_are_not_run_and_end_the_row():
    environment = Answers({"max_tool_turns": 1})
    assert environment.config.turns_needed == 2
    metadata = step_checked(environment, "t", [asks(call("double", x=2))], [{"expected": "4"}]).metadata
    found = step_checked(environment, "t", [asks(call("double", x=2))], metadata)
    assert (found.terminateds.tolist(), found.rewards.tolist()) == ([True], [0.0])
    assert found.metadata[0]["tool_use"]["calls"] == 1


def test_steps_in_which_all_rows_call_tools_have_no_reward_to_add():
    found = step_checked(Answers(), "t", [asks(call("double", x=2))], [None])
    assert found.rewards == {}
    assert found.metadata[0]["tool_use"]["calls"] == 1


def test_the_offered_tools_are_known_without_an_instance():
    assert [spec["function"]["name"] for spec in Answers.offered_tools()] == [function.__name__ for function in FUNCTIONS]


def test_two_tools_with_one_name_are_refused():
    class Twice(Answers):
        functions = (double, double)

    with pytest.raises(ConfigError, match="Twice has two tools with the name 'double'"):
        Twice()


def test_an_unknown_key_of_a_tool_environment_is_refused():
    with pytest.raises(ConfigError, match="call_timeout"):
        Answers({"call_timeout": 3})


def whose() -> str:
    return str(current_session())


async def whose_async() -> str:
    await asyncio.sleep(0)
    return str(current_session())


def unavailable() -> str:
    raise ToolUnavailableError("the service is down")


class Services(Answers):
    functions = (whose, whose_async, unavailable)


def test_a_tool_can_read_the_session_of_its_rollout():
    calls = asks(call("whose"), call("whose_async", 1))
    made = step_checked(Services(), "t", [calls, calls, calls], [{"session_id": "a"}, {"session_id": "b"}, {}])
    assert [[message["content"] for message in each] for each in made.observations] == [["a"] * 2, ["b"] * 2, ["None"] * 2]


def test_a_row_whose_tool_is_unavailable_ends_and_is_not_scored(caplog):
    rows = [asks(call("unavailable"), call("whose", 1)), asks(call("whose"))]
    made = step_checked(Services({"invalid_call_penalty": 1.0}), "t", rows, [{}, {}])
    assert (made.scored.tolist(), made.terminateds.tolist()) == ([False, True], [1.0, 0.0])
    assert made.metadata[0]["tool_use"]["problems"] == {}
    assert "Services: a row has failed, because a tool is unavailable: Error: the service is down" in caplog.text
    assert made.failures == ["Error: the service is down", None]


def fails_for_odd_numbers(x: int) -> int:
    return [x][x % 2]


def test_a_tool_that_raises_the_same_exception_in_most_calls_is_reported_once_with_its_line(own_messages):
    class Fails(Answers):
        functions = (fails, fails_for_odd_numbers)

    environment = Fails({"max_tool_turns": 100})
    for x in range(24):
        environment.step([asks(call("fails", x=x), call("fails_for_odd_numbers", x=x))], [None])
    line = fails.__code__.co_firstlineno + 1
    expected = f"Fails: the tool fails raised KeyError at {__file__}:{line} in 10 of its 10 calls"
    assert [text.partition(",")[0] for text in own_messages() if "raised" in text] == [expected]


def test_a_tool_that_raises_in_most_calls_is_reported_after_any_number_of_good_calls(own_messages):
    class Fails(Answers):
        functions = (fails_for_odd_numbers,)

    environment = Fails({"max_tool_turns": 100})
    for x in [0] * 11 + [1] * 20:
        environment.step([asks(call("fails_for_odd_numbers", x=x), call("unknown", x=x))], [None])
    [message] = [text for text in own_messages() if "raised" in text]
    assert "in 12 of its 23 calls" in message
