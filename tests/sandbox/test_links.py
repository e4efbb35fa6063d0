"""Two programs in two sessions exchange bytes over a link, and nothing else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_sandbox.interface import Outcome, SandboxError

ASKS = "import os\nos.write(4, b'ping')\nprint(os.read(3, 99))\nos.write(4, b'bye')\nprint(os.read(3, 99))"
ANSWERS = "import os\nos.read(3, 99)\nos.write(4, b'pong')\nos.read(3, 99)"


def run_linked(first, second, codes, timeouts=(60.0, 60.0)):
    (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(session.run_program, code, timeout_s=timeout, link=link)
            for session, code, timeout, link in zip(
                (first, second), codes, timeouts, ((a_reads, a_writes), (b_reads, b_writes)), strict=True
            )
        ]
        return [call.result() for call in calls]


def test_linked_programs_exchange_bytes_and_read_the_end_when_the_other_one_ends(sandbox):
    with sandbox.open_session() as first, sandbox.open_session() as second:
        second.wait_until_started()
        for _ in range(2):  # sessions are usable again
            asked, answered = run_linked(first, second, (ASKS, ANSWERS))
            assert asked.stdout == "b'pong'\nb''\n", asked.stderr
            assert answered.outcome is Outcome.OK
        assert first.run_program("import os\nprint(os.read(0, 1))").stdout == "b''\n"
        assert first.run_program("import os\nos.write(4, b'x')").outcome is Outcome.ERROR  # the link has ended


def test_a_program_that_is_killed_at_its_limit_ends_the_link(sandbox):
    with sandbox.open_session() as first, sandbox.open_session() as second:
        hangs = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nwhile True: time.sleep(1)"
        waits, hung = run_linked(first, second, ("import os\nprint(os.read(3, 9))", hangs), (60.0, 0.2))
        assert (waits.stdout, hung.outcome) == ("b''\n", Outcome.TIMEOUT)


def test_programs_find_preloaded_modules_but_not_each_others(session):
    assert session.preload("import sys\nsys.modules['shared'] = type(sys)('shared')\nsys.modules['shared'].n = 1")
    changes = "import shared\nprint(shared.n)\nshared.n = 2"
    assert [session.run_program(changes).stdout for _ in range(2)] == ["1\n", "1\n"]


def test_preloading_has_the_time_limit_of_a_start_and_fails_with_the_reason(session, monkeypatch):
    monkeypatch.setattr(session, "_timeout_s", 0.1)
    monkeypatch.setattr(session, "_grace_s", 0.1)
    assert session.preload("import time\ntime.sleep(1.0)")
    assert session.run_program("print(1)", timeout_s=60.0).stdout == "1\n"
    with pytest.raises(SandboxError, match=r"(?s)could not be preloaded.*ZeroDivisionError"):
        session.preload("1 / 0")


def test_a_call_that_fails_closes_its_link(sandbox):
    session = sandbox.open_session()
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        session.wait_until_started()
    reader, writer = os.pipe()
    other_reader, other_writer = os.pipe()
    with pytest.raises(SandboxError, match="closed"):
        session.run_program("1", link=(reader, other_writer))
    assert os.read(other_reader, 1) == b""
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    os.close(writer)
    os.close(other_reader)
