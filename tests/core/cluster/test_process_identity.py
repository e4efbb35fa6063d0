"""A process is identified by pid and start, also after clock changes."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from rl_core.cluster.actor_host import Identity
from rl_core.cluster.remote_actor import RemoteActor


@pytest.fixture
def actor_of():
    def make(pid):
        actor = RemoteActor.__new__(RemoteActor)  # the process is given instead of started by Ray
        actor._death_seen = False
        actor._identity = Identity(
            host=socket.gethostname(), address="", port=0, node_id="", pid=pid, stack_file="", log_file=""
        )
        actor._process = psutil.Process(pid)
        return actor

    return make


@pytest.mark.parametrize("seconds", [-60.0, 1.0, 60.0])
def test_clock_corrections_do_not_make_processes_dead(actor_of, monkeypatch, seconds):
    actor, started = actor_of(os.getpid()), psutil.Process().create_time()
    # Linux adjusts the boot time, which times of processes are relative to, with the clock.
    boot_time = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time + seconds)
    assert psutil.Process().create_time() == pytest.approx(started + seconds, abs=1.0)
    assert actor.is_alive()


def test_a_reused_pid_is_not_the_process(actor_of, monkeypatch):
    actor, process = actor_of(os.getpid()), psutil._psplatform.Process
    read = process.create_time
    assert actor.is_alive()
    monkeypatch.setattr(
        psutil._psplatform.Process, "create_time", lambda self, *args, **kwargs: read(self, *args, **kwargs) + 60
    )
    assert not actor.is_alive()


def test_a_process_is_dead_once_it_has_exited_and_before_its_parent_has_noticed(actor_of):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        actor = actor_of(child.pid)
        assert actor.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert not actor.is_alive()
    assert not actor.is_alive()
