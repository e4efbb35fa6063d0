"""Ray waits 30 seconds for its daemons, too short on a busy machine: it is started once more, and then an error is raised."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.ray

_DRIVER = """
import json, os, signal, sys, time, types
import psutil, ray
from ray._private import node, services
from rl_core.cluster.ray_runtime import RayLease
from rl_core.errors import RLCoreError

daemon, frozen_attempts = sys.argv[1], int(sys.argv[2])
started = []
clock = types.SimpleNamespace(**vars(time), offset=0.0, step=0.0)
node.time = clock

def monotonic():
    clock.offset += clock.step
    return time.monotonic() + clock.offset

clock.monotonic = monotonic

def freezing(name):
    start = getattr(services, name)

    def wrapped(*args, **kwargs):
        info = start(*args, **kwargs)
        started.append((name, info.process.pid))
        freeze = name == daemon and sum(other == name for other, _ in started) <= frozen_attempts
        if freeze:
            os.kill(info.process.pid, signal.SIGSTOP)
        # Ray's two limits: an environment variable for the GCS server, a clock for the raylet.
        os.environ["RAY_gcs_server_port_wait_time_s"] = "0" if freeze else "300"
        clock.step = 31.0 if freeze else 0.0
        return info

    setattr(services, name, wrapped)

freezing("start_gcs_server")
freezing("start_raylet")

def alive():
    return [process.pid for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]

answer, error, code = None, "", 0
try:
    lease = RayLease()
except RLCoreError as failure:
    error, code, left = str(failure), failure.exit_code, alive()
else:
    answer = ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote(), timeout=300)
    left = alive()
    lease.release()
print(json.dumps([answer, error, [(name, pid, pid in left) for name, pid in started], left]))
sys.exit(code)
"""


def _start_ray(daemon: str, frozen_attempts: int):
    """Exit code, answer of a task, error, started daemons, living processes, standard error and left folders of a driver.

    Its first attempts start a daemon that does not respond, and Ray's limit then passes at once.
    """
    scratch = tempfile.mkdtemp(prefix="t")  # short: Ray keeps sockets under it
    try:
        command = [sys.executable, "-c", _DRIVER, daemon, str(frozen_attempts)]
        done = subprocess.run(command, env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True, timeout=600)
        assert done.stdout, done.stderr
        return (done.returncode, *json.loads(done.stdout), done.stderr, glob.glob(f"{scratch}/rlcore-ray-*"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


FULL = pytest.mark.full("Ray waits for its raylet for 20 seconds by any clock; in CI its GCS server does not respond")
DAEMONS = ["start_gcs_server", pytest.param("start_raylet", marks=FULL)]


@pytest.mark.slow
@pytest.mark.parametrize("daemon", DAEMONS)
def test_ray_that_does_not_start_in_time_is_removed_and_started_once_more(daemon):
    code, answer, error, started, _, log, folders = _start_ray(daemon, 1)
    assert (code, answer, error) == (0, 7, ""), log
    attempts = len(started) - 2
    assert [lives for _, _, lives in started] == [False] * attempts + [True] * 2
    assert "did not start" in log
    assert "once more" in log
    assert folders == []


@pytest.mark.parametrize("daemon", DAEMONS)
def test_ray_that_does_not_start_twice_is_an_error_that_names_limit_and_load_and_leaves_nothing(daemon):
    code, _, error, started, left, log, folders = _start_ray(daemon, 2)
    assert code == 1, log
    assert [name for name, _, _ in started].count(daemon) == 2
    assert (left, folders) == ([], [])
    for words in ("in two attempts: ", "imed out", "30 s", "CPUs with a load of", "set RAY_ADDRESS"):
        assert words in error
    assert "Traceback" not in log
