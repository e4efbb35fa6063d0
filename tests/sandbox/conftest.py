"""Sandboxes at the level of the current user and, in `make test-full` as root, at that of a normal user."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from isolation import isolated

from rl_sandbox.local import Level, LocalSandbox

NORMAL_USER = 61200
LIMITS = {"memory_mb": 256, "disk_mb": 16, "max_processes": 32, "output_kb": 64, "timeout_s": 60.0}


def open_sandbox(config=LIMITS, **arguments):
    with isolated():
        return LocalSandbox(config, **arguments)


@pytest.fixture(
    scope="session",
    params=[
        "current_user",
        pytest.param("normal_user", marks=pytest.mark.full("the same attacks at the other level; CI has the current user's")),
    ],
)
def sandbox(request):
    if request.param == "current_user":
        opened = open_sandbox()
    elif os.getuid() == 0:
        opened = open_sandbox(level=Level.USER_NAMESPACE, drop_to=NORMAL_USER)
    else:
        pytest.skip("the current user is a normal user, so this is the same level")
    with opened:
        yield opened


@pytest.fixture
def session(sandbox):
    with sandbox.open_session() as opened:
        yield opened


@pytest.fixture
def off(tmp_path):
    """Runs a program without a sandbox: the positive control of an attack."""

    def run(code, stdin="", timeout=60.0):
        command = [sys.executable, "-I", "-c", code]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, check=False)

    return run


@pytest.fixture
def victim():
    """A process of the host."""
    process = subprocess.Popen(["sleep", "600"], env={"SECRET": "hunter2", "PATH": "/usr/bin:/bin"})
    yield process
    process.kill()
    process.wait()


def wait_until(holds, seconds=120.0):
    """Wait for an event outside of this process; fails if it does not happen."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
