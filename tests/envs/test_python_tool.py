"""The tool `python`: each rollout has its own interpreter, which keeps variables between calls."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from environment_steps import step_checked
from isolation import isolated

from rl_envs.tools.environment import ToolsEnvironment
from rl_sandbox.interface import SandboxError

from .conftest import descendants, wait_until


@pytest.fixture(scope="module")
def environment():
    limits = {"timeout_s": 20.0, "memory_mb": 256}
    with isolated():
        opened = ToolsEnvironment({"tools": ["python"], "call_timeout_s": 120.0, "sandbox": limits})
    yield opened
    opened.shutdown()


@pytest.fixture
def turn(environment):
    """One turn of several rollouts, each with its calls; returns the result of `step`. The rollouts end with the test."""
    sessions = set()

    def step(**codes):
        logs, metadata = [], []
        for session, own in codes.items():
            calls = [
                {"id": f"{number:09}", "type": "function", "function": {"name": "python", "arguments": {"code": code}}}
                for number, code in enumerate(own)
            ]
            logs.append([{"role": "assistant", "content": "", "tool_calls": calls}])
            metadata.append({"session_id": session, "expected_answer": "1"})
        sessions.update(codes)
        return step_checked(environment, "tools", logs, metadata)

    yield step
    for session in sessions:
        environment.close(session)


def read(made, row=0):
    return [message["content"] for message in made.observations[row]]


def test_variables_are_kept_between_the_calls_of_a_rollout_and_not_shared(turn):
    first = turn(a=["x = 6 * 7", "print(x)\nx + 1", "open('note', 'w').write('a')"], b=["x = 1"])
    assert read(first) == ["(no output)", "42\n43", "1"]
    second = turn(b=["x", "open('note').read()"], a=["x, open('note').read()"], c=["x"])
    assert read(second, 0)[0] == "1"
    assert "FileNotFoundError" in read(second, 0)[1]
    assert read(second, 1) == ["(42, 'a')"]
    assert "NameError: name 'x' is not defined" in read(second, 2)[0]
    assert second.scored.tolist() == [True] * 3


def test_calls_of_one_turn_run_in_the_order_of_the_message(turn):
    assert read(turn(a=["n = 0", *["n = 2 * n + 1"] * 6, "n"]))[-1] == "63"


def test_a_timeout_restarts_python_and_the_model_reads_it(environment, turn, monkeypatch):
    turn(a=["kept = 1; open('note', 'w').write('here')"])
    interpreter = environment._sandboxes[0]._interpreters["a"]
    with monkeypatch.context() as short:
        short.setattr(interpreter, "_config", environment.config.sandbox.model_copy(update={"timeout_s": 0.5}))
        [stopped] = read(turn(a=["while True: pass"]))
    assert stopped == "The code was stopped after 0.5 seconds.\nPython was restarted: variables are lost, files are kept."
    missing, file = read(turn(a=["kept", "open('note').read()"]))
    assert "NameError" in missing
    assert file == "'here'"


def test_code_that_ends_its_interpreter_or_its_session_says_what_is_lost(turn):
    exits, ends, works = read(turn(a=["import os; os._exit(3)", "import os; os.kill(os.getppid(), 9)", "1 + 1"]))
    assert exits == "Python was restarted: variables are lost, files are kept."
    assert ends.endswith("Python was restarted: variables and files are lost.")
    assert works == "2"


def test_closing_a_rollout_ends_its_session_and_no_other(environment, turn):
    turn(a=["x = 1"], b=["x = 2"])
    sandbox = environment._sandboxes[0]._sandbox
    before = len(sandbox._sessions)
    environment.close("a")
    environment.close("a rollout that never called python")
    assert len(sandbox._sessions) == before - 1
    assert read(turn(b=["x"])) == ["2"]


def test_a_row_whose_sandbox_does_not_work_ends_and_is_not_scored(environment, turn, monkeypatch):
    turn(a=["x = 1"])

    def fails():
        raise SandboxError("no more user ids")

    monkeypatch.setattr(environment._sandboxes[0]._sandbox, "open_session", fails)
    made = turn(a=["x"], b=["1"])
    assert (made.scored.tolist(), made.terminateds.tolist()) == ([True, False], [0.0, 1.0])
    assert made.failures == [None, "Error: the sandbox of the tool `python` does not work: no more user ids"]
    assert read(made) == ["1"]
    assert made.metadata[1]["tool_use"]["problems"] == {}


def test_a_rollout_whose_sandbox_dies_in_mid_call_fails_and_the_next_one_works(environment, turn):
    turn(a=["x = 1"])
    launcher = environment._sandboxes[0]._sandbox.process_id
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(lambda: turn(a=["import os, time\nwhile True: time.sleep(0.01)"]))
        wait_until(lambda: len(descendants(launcher)) >= 4)  # bubblewrap, process 1, agent, interpreter
        os.kill(launcher, signal.SIGKILL)
        made = call.result(timeout=60)
    assert made.scored.tolist() == [False]
    assert "ended from outside" in made.failures[0]
    assert made.metadata[0]["tool_use"]["problems"] == {}
    assert read(turn(again=["1 + 1"])) == ["2"]


def test_a_sandbox_that_starts_too_slowly_for_a_call_is_not_a_mistake_of_the_model(environment, turn, monkeypatch):
    released = threading.Event()
    sandbox = environment._sandboxes[0]._sandbox
    opens = sandbox.open_session

    def slow():
        released.wait()
        return opens()

    monkeypatch.setattr(sandbox, "open_session", slow)
    monkeypatch.setattr(environment, "_runner", replace(environment._runner, timeout_s=0.2))
    made = turn(slow=["1 + 1"])
    released.set()
    assert "did not start within call_timeout_s" in made.failures[0]
    assert made.metadata[0]["tool_use"]["problems"] == {}
