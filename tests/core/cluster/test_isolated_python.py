from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cluster_workers import Scorer, Worker

from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.errors import UserError
from rl_train.pools.actor_pool import ActorPool


def _make_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)], check=True)
    return folder


def _see_our_packages(folder: Path) -> None:
    """A venv created from a venv sees the packages of the base interpreter: add ours, with their .pth files."""
    paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
    target = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (target / "ours.pth").write_text(lines)


def test_workers_run_under_the_named_python(local_ray, tmp_path):
    folder = _make_environment(tmp_path / "other")
    _see_our_packages(folder)
    python = folder / "bin" / "python"
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, python=python) as isolated,
        ActorPool(cluster, Scorer, python=python) as pool,
    ):
        prefix, pid = isolated.run_one("interpreter")
        assert Path(prefix) == folder
        assert pid != os.getpid()
        assert isolated.run_all("add", 2) == [2]
        assert pool.submit("square", 2).result(60) == 4
    assert Path(sys.prefix) != folder


def test_an_unusable_python_interpreter_is_an_error_before_start(local_ray, tmp_path):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        bare = _make_environment(tmp_path / "bare") / "bin" / "python"
        for python, word in [(tmp_path / "none", "does not exist"), (Path("/bin/true"), "does not behave"), (bare, "install")]:
            with pytest.raises(UserError, match=word):
                RayWorkerGroup(cluster, Worker, python=python)
