"""A process is identified by pid and age, also after clock changes."""

import os
import socket

import psutil
import pytest

from rl_core.cluster.actor_host import Identity
from rl_core.cluster.remote_actor import RemoteActor


@pytest.mark.parametrize(("seconds", "known"), [(0.0, True), (1.0, True), (-1.0, True), (60.0, False), (-60.0, False)])
def test_clock_corrections_do_not_make_processes_dead_and_reused_pids_are_detected(seconds, known):
    # Both use the boot time, which the kernel reports in whole seconds and adjusts with the clock.
    actor = RemoteActor.__new__(RemoteActor)  # what Ray would start is this process
    actor._death_seen = False
    actor._identity = Identity(
        host=socket.gethostname(),
        address="",
        port=0,
        node_id="",
        pid=os.getpid(),
        created=psutil.Process().create_time() + seconds,
        stack_file="",
        log_file="",
    )
    assert actor.is_alive() == known
