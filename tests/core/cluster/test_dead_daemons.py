"""A run whose Ray loses a daemon exits promptly with the name of the daemon, in any phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from cluster_workers import lives, wait_until

pytestmark = pytest.mark.ray

_DRIVER = """
import sys, time
from pathlib import Path
from rl_core.cluster import RayVirtualCluster, RayWorkerGroup

class Sleeper:
    def ready(self):
        return True
    def sleep(self, note):
        Path(note).touch()
        time.sleep(600)

if __name__ == "__main__":
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5) as cluster, RayWorkerGroup(cluster, Sleeper) as group:
        group.run_all("ready")
        print("ready", flush=True)
        if sys.argv[1] == "computing":
            sys.stdin.readline()
        group.run_all("sleep", sys.argv[2])
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """One driver waits for its workers, the other computes by itself; both start at the same time."""
    folder = tmp_path_factory.mktemp("drivers")
    script = folder / "driver.py"
    script.write_text(_DRIVER)
    made = {
        doing: subprocess.Popen(
            [sys.executable, str(script), doing, str(folder / doing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for doing in ("waiting", "computing")
    }
    yield made, folder
    for driver in made.values():
        driver.kill()
        driver.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doing", "process", "name"), [("waiting", "raylet", "Ray's raylet"), ("computing", "gcs_server", "Ray's GCS server")]
)
def test_driver_exits_and_names_the_ray_daemon_that_was_killed(drivers, doing, process, name):
    made, folder = drivers
    driver = made[doing]
    assert any(line.startswith("ready") for line in driver.stdout), driver.stderr.read()
    started = psutil.Process(driver.pid).children(recursive=True)
    [victim] = [child.pid for child in started if child.name() == process]
    if doing == "waiting":
        assert wait_until((folder / doing).exists)
    os.kill(victim, signal.SIGKILL)
    # Ray itself ends the process after 14 to 60 s, with an exit code of 1 too but without the error below.
    _, errors = driver.communicate("go\n", timeout=300)
    assert driver.returncode == 1, errors
    assert f"{name} (process {process}, pid {victim}) died" in errors
    assert f"{process}.out" in errors
    assert "run the same command again" in errors
    assert wait_until(lambda: not any(map(lives, started)))
