"""Nothing that comes out of a sandbox is trusted: neither printed imitations of the protocol nor a hijacked agent."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from rl_sandbox import wire
from rl_sandbox.interface import Outcome, SandboxError
from rl_sandbox.session import LocalSession

FORGED = wire.REPLY.pack(wire.OK, 0, 0, 6, 0) + b"forged"

WRITES_TO_EVERY_FILE = f"""
import os
for descriptor in range(256):
    try:
        os.write(descriptor, {FORGED!r})
    except OSError:
        pass
os._exit(9)
"""


def test_a_program_cannot_forge_its_result(session):
    result = session.run_program(WRITES_TO_EVERY_FILE)
    assert (result.outcome, result.exit_code) == (Outcome.ERROR, 9)
    assert "forged" in result.stdout
    assert session.run_program("print('next')").stdout == "next\n"


def test_code_in_the_interpreter_cannot_forge_the_next_result(session):
    """It shares a process with the loop that reports the end of a call, so it can end its own call early, but no other."""
    session.run(WRITES_TO_EVERY_FILE.replace("os._exit(9)", ""))
    assert session.run_program("print('next')").stdout == "next\n"


def answering(data, *, keep_open=False, delay=0.0, timeout_s=60.0):
    """A session whose agent sends these bytes to every call, and the event that it ends with."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def answer():
        with theirs:
            theirs.sendall(wire.READY)
            theirs.recv(1 << 16)
            for piece in data if isinstance(data, list) else [data]:
                try:
                    theirs.sendall(piece)
                except OSError:
                    return
                time.sleep(delay)
            if keep_open:
                ended.wait()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    errors = os.memfd_create("errors")
    return LocalSession(ours, errors, lambda: ended.set(), timeout_s=timeout_s, output=1024, grace_s=0.2), ended


def test_a_correct_answer_is_accepted():
    session, ended = answering(FORGED, keep_open=True)
    with session:
        assert session.run("1").stdout == "forged"
        assert not ended.is_set()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        FORGED[:5],
        FORGED[:-1],
        wire.REPLY.pack(77, 0, 0, 0, 0),
        wire.REPLY.pack(wire.OK, 0, 0, 4096, 0) + b"x" * 4096,
        wire.REPLY.pack(wire.OK, 0, 0, 0, 0xFFFFFFFF),
        b'{"outcome": "ok"}' * 100,
    ],
    ids=["nothing", "cut_header", "cut_body", "unknown_outcome", "above_the_limit", "gigantic_size", "another_format"],
)
def test_an_answer_that_breaks_the_rules_ends_the_session(data):
    session, ended = answering(data)
    with session:
        assert session.run("1").outcome is Outcome.LOST
        assert ended.is_set()
        assert session.run("1").outcome is Outcome.LOST


@pytest.mark.parametrize("data", [[], [b"\0"] * 1000], ids=["silence", "a_trickle_of_bytes"])
def test_an_agent_that_does_not_finish_its_answer_is_a_timeout(data):
    session, ended = answering(data, keep_open=True, delay=0.05, timeout_s=0.1)
    with session:
        result = session.run("1")
        assert result.outcome in (Outcome.TIMEOUT, Outcome.LOST)
        assert ended.is_set()


def test_undecodable_output_is_replaced_and_code_in_it_never_runs():
    session, _ = answering(wire.REPLY.pack(wire.OK, 0, 0, 3, 0) + b"\xff\x80.", keep_open=True)
    with session:
        assert session.run("1").stdout == "��."


@pytest.mark.parametrize(
    ("sent", "written", "says"),
    [
        (None, b"bwrap: No permissions", "did not start: bwrap: No permissions"),
        (None, b"", "did not start: it ended without an error message"),
        (b"?", b"", "did not start: its first message is not the agent's"),
        (b"", b"", "did not start: no answer within 0.1 seconds"),
    ],
    ids=["error", "silent_end", "another_message", "silence"],
)
def test_a_session_that_does_not_start_is_an_error_of_the_sandbox_and_not_of_the_program(sent, written, says):
    ours, theirs = socket.socketpair()
    errors, ended = os.memfd_create("errors"), threading.Event()
    os.write(errors, written)
    theirs.sendall(sent or b"")
    if sent is None:
        theirs.close()
    start_s = 0.1 if sent == b"" else 60.0  # only the silent agent reaches the limit
    with LocalSession(ours, errors, ended.set, timeout_s=0.1, output=1024, start_s=start_s) as session:
        for _ in range(2):
            with pytest.raises(SandboxError, match=says):
                session.run_program("1")
        assert ended.is_set()
    theirs.close()
