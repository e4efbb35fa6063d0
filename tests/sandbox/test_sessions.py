"""Sessions run code, keep their state, are separate from each other, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from isolation import require_isolation

from rl_core.errors import ConfigError
from rl_sandbox import agent
from rl_sandbox.cgroups import PREFIX
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, SandboxError, SandboxUnavailableError
from rl_sandbox.local import Level, LocalSandbox, agent_source

from .conftest import open_sandbox, wait_until


@pytest.mark.parametrize("reading", ["open(0)", "open('/dev/stdin')", "__import__('sys').stdin"])
def test_programs_read_large_input_in_the_usual_ways(session, reading):
    numbers = "\n".join(map(str, range(100_000)))
    assert session.run_program(f"print(sum(map(int, {reading})))", stdin=numbers).stdout == "4999950000\n"


def test_a_program_is_main_with_threads_exit_handlers_and_subprocesses(session):
    code = """
import atexit, dataclasses, subprocess, sys, threading
@dataclasses.dataclass
class Point:
    x: int
assert __name__ == "__main__" and sys.modules["__main__"].Point is Point
atexit.register(lambda: print("exit"))
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout, end="")
threading.Timer(0.05, lambda: print("thread")).start()
"""
    assert session.run_program(code).stdout == "child\nthread\nexit\n"


def test_an_exception_shows_the_line_of_the_program(session):
    result = session.run_program("def f():\n    return 1 / 0\nf()")
    assert result.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 3, in <module>',
        "    f()",
    ]
    assert result.outcome is Outcome.ERROR


def test_a_timeout_ends_the_interpreter_and_files_remain(session):
    session.run("kept = 1; open('note', 'w').write('here')")
    result = session.run("while True: pass", timeout_s=0.2)
    assert (result.outcome, result.state_lost) == (Outcome.TIMEOUT, True)
    assert session.run("kept").outcome is Outcome.ERROR
    assert session.run_program("print(open('note').read())").stdout == "here\n"


def test_sessions_share_nothing(sandbox):
    with sandbox.open_session() as one, sandbox.open_session() as other:
        one.run("secret = 1; open('secret', 'w').write('x'); open('/dev/shm/secret', 'w').write('x')")
        assert other.run("secret").outcome is Outcome.ERROR
        found = other.run_program("import os; print(os.listdir('.'), os.listdir('/dev/shm'))")
        assert found.stdout == "['tmp'] []\n"


def test_a_session_used_from_several_threads_runs_one_call_after_another(session):
    session.run("n = 0")
    threads = [threading.Thread(target=session.run, args=("n += 1",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.run("n").stdout == "8\n"


def test_a_session_outlives_the_thread_that_opened_it(sandbox):
    opened = []
    thread = threading.Thread(target=lambda: opened.append(sandbox.open_session()))
    thread.start()
    thread.join()
    with opened[0] as session:
        assert session.run_program("print(1)").stdout == "1\n"


def running_call(session, has_begun):
    """A call that has begun; its future has the result or what was raised."""
    future = Future()

    def call():
        try:
            future.set_result(session.run_program("import time; time.sleep(600)"))
        except SandboxError as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    wait_until(has_begun)
    return future


def has_program(sandbox):
    """Whether a session of this sandbox has a process besides those that control it."""
    return lambda: len(descendants(sandbox.process_id)) > CONTROLLING[sandbox.level]


CONTROLLING = {Level.ISOLATED_UID: 3, Level.USER_NAMESPACE: 3, Level.RLIMITS: 1}
"""bubblewrap outside, its process 1 inside, and the agent; without bubblewrap only the agent."""


def descendants(process):
    children = _read(Path(f"/proc/{process}/task/{process}/children")).split()
    return [int(child) for child in children] + [each for child in children for each in descendants(int(child))]


def test_closing_a_session_ends_its_running_call_with_an_error(sandbox):
    session = sandbox.open_session()
    call = running_call(session, has_program(sandbox))
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        call.result(timeout=120)
    with pytest.raises(SandboxError, match="closed"):
        session.run("1")


def test_a_call_whose_launcher_dies_is_an_error_and_no_result_of_the_program():
    with open_sandbox() as sandbox, sandbox.open_session() as session:
        call = running_call(session, has_program(sandbox))
        os.kill(sandbox.process_id, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"ended from outside: its launcher \(process \d+\) exited"):
            call.result(timeout=120)
        with pytest.raises(SandboxError, match="ended from outside"):
            session.run("1")


def test_a_call_whose_container_is_killed_from_outside_is_an_error():
    with open_sandbox() as sandbox, sandbox.open_session() as session:
        call = running_call(session, has_program(sandbox))
        [bubblewrap] = map(int, _read(Path(f"/proc/{sandbox.process_id}/task/{sandbox.process_id}/children")).split())
        os.kill(bubblewrap, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended from outside: the process that contains it was killed by signal 9"):
            call.result(timeout=120)


def test_a_program_that_kills_its_agent_is_responsible_for_the_lost_session(session):
    assert session.run_program("import os; os.kill(os.getppid(), 9)").outcome is Outcome.LOST
    assert session.run("1").outcome is Outcome.LOST


def test_lone_surrogates_and_undecodable_output_do_not_raise(session):
    assert session.run_program("print('\ud800')").outcome is not Outcome.LOST
    assert session.run_program("import sys; sys.stdout.buffer.write(b'\\xff\\x00')").stdout == "�\x00"


def test_packages_of_the_interpreter_are_hidden_unless_listed(session):
    assert "ModuleNotFoundError" in session.run_program("import numpy").stderr
    with open_sandbox({"packages": ["numpy"], "memory_mb": 1024}) as sandbox, sandbox.open_session() as with_numpy:
        assert with_numpy.run_program("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"


def test_a_listed_package_that_is_not_installed_is_refused():
    with pytest.raises(SandboxUnavailableError, match="package nonexistent_package: ModuleNotFoundError"):
        LocalSandbox({"packages": ["nonexistent_package"], "require": "rlimits"}, level=Level.RLIMITS)


def test_another_interpreter_can_be_chosen():
    other = Path("/usr/bin/python3")
    if not other.exists():
        pytest.skip("there is no /usr/bin/python3")
    with open_sandbox({"python": str(other)}) as sandbox, sandbox.open_session() as session:
        assert session.run_program("import sys; print(sys.prefix)").stdout == "/usr\n"


def test_an_interpreter_with_other_bytecode_gets_the_source(monkeypatch):
    agent_source.cache_clear()
    monkeypatch.setattr("importlib.util.MAGIC_NUMBER", b"other")
    with LocalSandbox({"require": "rlimits"}, level=Level.RLIMITS) as sandbox, sandbox.open_session() as session:
        assert session.run_program("print(3)").stdout == "3\n"
    agent_source.cache_clear()


def test_an_interpreter_that_does_not_run_is_refused():
    with pytest.raises(SandboxUnavailableError, match="'/nonexistent/python' did not run"):
        LocalSandbox({"python": "/nonexistent/python"})


def test_missing_bubblewrap_is_reported_with_the_package_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailableError) as error:
        LocalSandbox()
    assert "apt-get install bubblewrap" in str(error.value)
    assert "sandbox.require: rlimits" in str(error.value)
    with LocalSandbox({"require": "rlimits"}) as sandbox, sandbox.open_session() as session:
        assert sandbox.level is Level.RLIMITS
        assert session.run_program("print(2)").stdout == "2\n"


def test_a_level_whose_limits_have_no_effect_is_refused():
    """Root in a user namespace is still root outside, for which the kernel ignores the limit of processes."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    require_isolation()
    with pytest.raises(SandboxUnavailableError, match="the limit of processes has no effect"):
        LocalSandbox({"max_processes": 8}, level=Level.USER_NAMESPACE)


def test_unknown_config_keys_are_refused():
    with pytest.raises((ConfigError, ValueError), match="requires"):
        SandboxConfig(requires="rlimits")


def leftovers(launcher):
    """Processes, cgroups and folders that belong to a launcher."""
    children = [path for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == launcher]
    cgroups = [
        *Path("/sys/fs/cgroup").glob(f"*/**/{PREFIX}{launcher}_*"),
        *Path("/sys/fs/cgroup").glob(f"{PREFIX}{launcher}_*"),
    ]
    return [*children, *cgroups]


def _parent(stat):
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def test_closing_leaves_no_process_and_no_cgroup():
    sandbox = open_sandbox()
    session = sandbox.open_session()
    session.run("import subprocess; subprocess.Popen(['sleep', '600'])")
    launcher = sandbox.process_id
    assert leftovers(launcher)
    session.close()
    assert leftovers(launcher) == []
    sandbox.open_session()
    sandbox.close()
    assert leftovers(launcher) == []
    assert not Path(f"/proc/{launcher}").exists()


CRASHING = """
import os, sys
from rl_sandbox.local import Level, LocalSandbox
sandbox = LocalSandbox({"require": "rlimits"}, level=Level(sys.argv[1]))
session = sandbox.open_session()
session.run(f"import subprocess; subprocess.Popen(['sleep', {sys.argv[2]!r}], start_new_session=True)")
print(sandbox.process_id, session.run("import os; os.getcwd()").stdout.strip().strip("'"), flush=True)
session.run("import time; time.sleep(600)")
"""


@pytest.mark.parametrize("level", [None, Level.RLIMITS], ids=["isolated", "rlimits"])
def test_nothing_is_left_after_the_process_that_uses_a_sandbox_was_killed(level):
    if level is None:
        with open_sandbox() as opened:
            level = opened.level
    seconds = f"601.{os.getpid()}"  # tells its process from those of other test processes
    command = [sys.executable, "-c", CRASHING, level.value, seconds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as user:
        launcher, folder = user.stdout.readline().split()
        assert leftovers(int(launcher))
        user.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{launcher}").exists())
    assert leftovers(int(launcher)) == []
    assert level is not Level.RLIMITS or not Path(folder).exists()
    sleeps = f"sleep\0{seconds}\0".encode()
    wait_until(lambda: not any(sleeps in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")))


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_sessions_can_be_opened_again_after_the_launcher_was_killed():
    with open_sandbox() as sandbox:
        lost = sandbox.open_session()
        assert lost.run("1").outcome is Outcome.OK
        os.kill(sandbox.process_id, signal.SIGKILL)
        launcher = sandbox.process_id
        with pytest.raises(SandboxError, match="ended from outside"):
            lost.run("while True: pass")  # the session ends a moment after its launcher
        with sandbox.open_session() as session:
            assert session.run("1 + 1").stdout == "2\n"
        assert leftovers(launcher) == []


def test_a_launcher_that_does_not_answer_is_killed_and_replaced():
    with LocalSandbox({"require": "rlimits"}, level=Level.RLIMITS) as sandbox:
        hanging = sandbox.process_id
        os.kill(hanging, signal.SIGSTOP)
        sandbox._launcher._control.settimeout(0.2)
        with pytest.raises(SandboxError, match=r"did not answer within 0\.2 seconds and was killed"):
            sandbox.open_session()
        with sandbox.open_session() as session:
            assert session.run_program("print(1)").stdout == "1\n"
        assert sandbox.process_id != hanging


def test_a_program_that_cannot_be_prepared_reports_why():
    with LocalSandbox({"require": "rlimits"}, level=Level.RLIMITS) as sandbox, sandbox.open_session() as session:
        session.run_program("import os, shutil; shutil.rmtree(os.getcwd())")
        result = session.run_program("print(1)")
    assert result.outcome is Outcome.ERROR
    assert result.stderr.startswith("The sandbox could not run the program: FileNotFoundError")


def test_sessions_that_are_closed_while_they_start_leave_nothing():
    with open_sandbox() as sandbox:
        for number in range(20):
            session = sandbox.open_session()
            time.sleep(number * 0.001)  # the child of bubblewrap exists from some moment on
            session.close()
        assert leftovers(sandbox.process_id) == []


def test_killing_processes_that_have_already_ended_does_not_raise(monkeypatch):
    def no_process(*_):
        raise ProcessLookupError

    made = agent.Agent(SimpleNamespace(contained=True))
    monkeypatch.setattr(agent, "_others", lambda known: ["12345"])
    monkeypatch.setattr(os, "kill", no_process)
    assert made._kill(SimpleNamespace(pid=12345), everything=False) is False
