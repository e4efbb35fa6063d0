"""All processes end with their driver, however it ends."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from cluster_workers import lives, wait_until

from rl_core.cluster import orphan_reaper

pytestmark = pytest.mark.ray

_DRIVER = """
import multiprocessing, os, subprocess, sys, time
from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_train.pools.actor_pool import ActorPool

class Parent:
    def spawn(self):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    def hang(self):
        time.sleep(600)

if __name__ == "__main__":
    cluster = RayVirtualCluster([1], use_gpus=False)
    group = RayWorkerGroup(cluster, Parent)
    pool = ActorPool(cluster, Parent)
    group.run_all("spawn")
    pool.submit("spawn").result()
    print("ready", flush=True)
    sys.stdin.readline()
    end = sys.argv[1]
    if end == "exception":
        raise RuntimeError("the driver failed")
    if end != "success":
        group.run_all("hang")
"""


# How a driver ends -> its signal and its exit status. SIGINT goes to its whole process group, as from a terminal.
_ENDS = {
    "success": (None, 0),
    "exception": (None, 1),
    "ctrl-c": (signal.SIGINT, None),
    "sigterm": (signal.SIGTERM, None),
    "kill": (signal.SIGKILL, -signal.SIGKILL),
}


class _Driver:
    def __init__(self, end: str, script: Path) -> None:
        self.scratch = tempfile.mkdtemp(prefix="t")  # short: Ray keeps sockets under it
        self.errors = script.with_name(f"{end}.err")
        self.process = subprocess.Popen(
            [sys.executable, str(script), end],
            env={**os.environ, "TMPDIR": self.scratch},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        ready = any(line.startswith("ready") for line in self.process.stdout)
        assert ready, f"it ended with {self.process.wait()}:\n{self.errors.read_text()}"

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, sign: signal.Signals | None) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        if sign is not None:
            time.sleep(0.5)
            os.killpg(self.process.pid, sign) if sign is signal.SIGINT else self.process.send_signal(sign)
        return self.process.wait(timeout=180)


@pytest.fixture
def driver(request, tmp_path):
    """A running driver that ends in the way that the test names."""
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    made = _Driver(request.getfixturevalue("end"), script)
    try:
        made.wait_ready()
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        shutil.rmtree(made.scratch, ignore_errors=True)


def described(process: psutil.Process) -> str:
    """The command line of the process, or nothing if it ends meanwhile."""
    try:
        return " ".join([process.name(), *process.cmdline()])[:200]
    except psutil.NoSuchProcess:
        return ""


FULL = pytest.mark.full("in CI a driver is killed; e2e/test_stopped_runs.py looks for processes after Ctrl-C")
ALWAYS = ("kill",)


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param(end, marks=() if end in ALWAYS else FULL) for end in _ENDS])
def test_no_process_outlives_a_driver_that_ends_by(end, driver):
    sign, status = _ENDS[end]
    started = driver.descendants()
    names = [process.name() for process in started]
    assert names.count("sleep") == 2, names
    returned = driver.end(sign)
    assert returned == status if status is not None else returned != 0
    left = {process.pid: described(process) for process in started if lives(process)}
    wait_until(lambda: not any(map(lives, started)))
    assert {pid: name for pid, name in left.items() if lives(pid)} == {}
    assert wait_until(lambda: glob.glob(f"{driver.scratch}/rlcore-ray-*") == [])


def test_a_ray_process_without_readable_environment_is_identified_by_its_logs(tmp_path):
    with (tmp_path / "agent.log").open("w") as log:
        agent = subprocess.Popen(["ray::Agent", "600"], executable="sleep", env={}, stderr=log)
        bystander = subprocess.Popen(["sleep", "600"], env={}, stderr=log)
    try:
        assert orphan_reaper.marked_processes("RLCORE_TEST", str(tmp_path)) == [agent.pid]
        orphan_reaper.sweep("RLCORE_TEST", str(tmp_path))
        assert agent.wait(timeout=60) == -signal.SIGKILL
        assert lives(bystander.pid)
    finally:
        agent.kill()
        bystander.kill()
        bystander.wait()


_STARTING = """
import signal
from ray._private import services
from rl_core.cluster.ray_runtime import RayLease

def interrupt(*_):
    raise KeyboardInterrupt

def start_raylet(*arguments, start=services.start_raylet, **settings):
    started = start(*arguments, **settings)
    signal.raise_signal(signal.SIGTERM)
    return started

services.start_raylet = start_raylet
signal.signal(signal.SIGTERM, interrupt)
try:
    RayLease()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_sigterm_while_ray_starts_is_handled_by_the_driver_and_leaves_nothing():
    scratch = tempfile.mkdtemp(prefix="t")
    try:
        command = [sys.executable, "-c", _STARTING]
        done = subprocess.run(command, env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
        assert wait_until(lambda: glob.glob(f"{scratch}/rlcore-ray-*") == [])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
