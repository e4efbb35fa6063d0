"""Hostile inputs, killed processes and killed parents: grading processes always end and do not affect other rows."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rl_envs.grading_process import Ending, GradingProcess
from rl_envs.math.answers import unboxed_answer
from rl_envs.math.environment import MathEnvironment

pytestmark = pytest.mark.slow

PARENS = "(" * 200 + "1" + ")" * 200
HOSTILE = [
    r"$9^{9^{9^9}}$",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10000000!}",
    r"$10000000!$",
    PARENS,
    rf"\boxed{{{PARENS}}}",
    "",
    "\x00\x07\ud800 ∫∑ \U0001f600 \u202e",
    "9" * 100_000,
    r"\boxed{" + "9" * 50_000 + "}",
    r"\boxed{" * 5_000,
    "{" * 20_000 + "}" * 20_000,
    r"\boxed{" + r"\frac{" * 3_000 + "}" * 6_000,
    "\\" * 10_000,
    r"\boxed{__import__('os').system('touch /tmp/rl_envs_was_here')}",
    "word " * 400_000,
]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_hostile_completions_are_wrong_and_do_not_affect_other_rows(grader):
    pairs = [pair for text in HOSTILE for pair in (("1", text), ("1/2", rf"\boxed{{0.5}} after {len(text)}"))]
    graded = grader.grade(*pairs)
    assert graded.rewards.tolist() == [0.0, 1.0] * len(HOSTILE), [one["grading"] for one in graded.metadata]
    assert not os.path.exists("/tmp/rl_envs_was_here")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_searching_a_hostile_completion_for_an_unboxed_answer_is_fast(text):
    started = time.thread_time()
    unboxed_answer(text, words=False)
    assert time.thread_time() - started < 2.0  # 0.1 s; a search that backtracks takes hours


def test_a_comparison_that_never_ends_is_counted_as_a_timeout(lenient_grader):
    graded = lenient_grader.grade(("1", r"\boxed{9^{9^{9^9}}}"))
    assert graded.metadata[0]["grading"] == "timeout"


def test_a_request_larger_than_the_pipe_to_a_stopped_process_does_not_wait_for_ever():
    process = GradingProcess("rl_envs.math.answers")
    request = {"expected": "1", "completion": "1", "question": "", "require_box": False, "allow_unevaluated": False}
    try:
        process.ask(request, timeout_s=60.0)
        os.kill(process.pid, signal.SIGSTOP)
        assert process.ask({**request, "completion": "1" * 2_000_000}, timeout_s=0.05) is Ending.STUCK
        assert process.pid is None
    finally:
        process.end()


def test_a_process_that_closes_its_pipes_and_does_not_exit_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_envs.grading_process._EXIT_S", 0.1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "closes_its_pipes.py").write_text(
        "import os, time\nprint('{}', flush=True)\ninput()\nos.close(1)\ntime.sleep(600)\n"
    )
    process = GradingProcess("closes_its_pipes")
    assert process.ask({}, timeout_s=60.0) is Ending.KILLED
    assert process.pid is None


def test_a_killed_process_is_replaced_without_losing_results(grader):
    grader.grade(("1", "1"), ("2", "2"))
    before = grader.environment.process_ids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    graded = grader.grade(*[(str(n), rf"\boxed{{{n}}}") for n in range(6)])
    assert graded.rewards.tolist() == [1.0] * 6
    assert set(grader.environment.process_ids()).isdisjoint(before)


def test_a_comparison_whose_process_is_killed_is_retried():
    environment = MathEnvironment({"timeout_s": 3.0, "allow_unevaluated": True})
    environment.step([[{"role": "assistant", "content": r"\boxed{1}"}]], [{"expected_answer": "1"}])
    (pid,) = environment.process_ids()
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    endless = r"\boxed{10000000!}"
    graded = environment.step([[{"role": "assistant", "content": endless}]], [{"expected_answer": "1"}])
    environment.shutdown()
    assert graded.metadata[0]["grading"] == "timeout"  # of the second process, which was not killed


class DyingProcess(GradingProcess):
    """A process that ends or stops when it gets a request."""

    def __init__(self, number):
        super().__init__("rl_envs.math.answers")
        self._number = number

    def _running(self):
        child = super()._running()
        child.send_signal(self._number)
        return child


REQUEST = {"expected": "1", "completion": r"\boxed{1}", "require_box": True, "allow_unevaluated": False}


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGKILL, Ending.KILLED), (signal.SIGSEGV, Ending.CRASHED), (signal.SIGPROF, Ending.CPU_LIMIT)],
)
def test_only_a_process_that_was_killed_from_outside_is_a_failure(number, ending):
    process = DyingProcess(number)
    assert process.ask(REQUEST, timeout_s=5.0) is ending
    process.end()
    assert ending.is_failure == (ending is Ending.KILLED)


def test_a_row_whose_process_is_stopped_fails_and_is_not_scored(monkeypatch):
    monkeypatch.setattr("rl_envs.grading_process._WALL_PER_CPU", 0.1)
    environment = MathEnvironment()
    environment._pool._started().get()
    environment._pool._idle.put(DyingProcess(signal.SIGSTOP))
    made = environment.step([[{"role": "assistant", "content": r"\boxed{1}"}]], [{"expected_answer": "1"}])
    environment.shutdown()
    assert (made.scored.tolist(), made.failures) == ([False], ["its grading process was stuck"])
    assert made.metadata[0]["grading"] == "not_graded"


def test_alarms_of_the_caller_are_not_changed(lenient_grader):
    rang = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    pending = signal.setitimer(signal.ITIMER_REAL, 0.2)
    lenient_grader.grade(("1", r"\boxed{1}"), ("1", r"\boxed{10000000!}"))
    wait_until(lambda: rang, timeout_s=60.0)
    signal.signal(signal.SIGALRM, previous)
    signal.setitimer(signal.ITIMER_REAL, *pending)
    assert rang == [True]


def test_grading_works_outside_the_main_thread(grader):
    graded = []
    thread = threading.Thread(target=lambda: graded.append(grader.grade(("3", r"\boxed{3}"))))
    thread.start()
    thread.join()
    assert graded[0].rewards.tolist() == [1.0]


def test_a_large_parent_does_not_make_its_children_retire():
    script = """
        from rl_envs.math.environment import MathEnvironment

        ballast = bytearray(b"x") * (1200 << 20)
        environment = MathEnvironment()
        for _ in range(2):
            environment.step([[{"role": "assistant", "content": "\\\\boxed{1/2}"}]], [{"expected_answer": "0.5"}])
            print(*environment.process_ids(), flush=True)
        environment.shutdown()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second


def test_shutdown_ends_every_process_and_may_be_called_twice():
    environment = MathEnvironment({"num_processes": 2})
    conversations = [[{"role": "assistant", "content": text}] for text in (r"\boxed{1}", r"\boxed{2}")]
    environment.step(conversations, [{"expected_answer": "1"}] * 2)
    pids = environment.process_ids()
    environment.shutdown()
    environment.shutdown()
    assert len(pids) == 2
    assert [pid for pid in pids if is_running(pid)] == []
    again = environment.step(conversations, [{"expected_answer": "1"}] * 2)
    environment.shutdown()
    assert again.rewards.tolist() == [1.0, 0.0]


SCRIPT = """
    from rl_envs.math.environment import MathEnvironment

    environment = MathEnvironment({"num_workers": 8, "timeout_s": 2.0, "require_box": False, "allow_unevaluated": True})
    def ask(text):
        return environment.step([[{"role": "assistant", "content": text}]], [{"expected_answer": "1"}])
    assert ask("1").rewards.tolist() == [1.0]
    print(*environment.process_ids(), flush=True)
    {then}
"""


HANG = r"ask('\boxed{10000000!}'); ask('\boxed{9^{9^{9^9}}}')"


@pytest.mark.parametrize("then", ["input()", HANG], ids=["idle", "busy"])
def test_no_process_outlives_a_killed_parent(then, tmp_path):
    # A script without `if __name__ == "__main__"`, which is what a user writes first.
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{then}", then))
    parent = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    assert pids
    assert wait_until(lambda: not any(map(is_running, pids)), timeout_s=120.0)


def test_the_configs_survive_pickling():
    from rl_envs import config

    for model in (
        config.MathEnvironmentConfig,
        config.ArithmeticEnvironmentConfig,
        config.ArithmeticDatasetConfig,
        config.GuessNumberEnvironmentConfig,
        config.GuessNumberDatasetConfig,
    ):
        section = model()
        assert pickle.loads(pickle.dumps(section)) == section
