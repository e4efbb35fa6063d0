from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cluster_workers import Scorer, Worker
from other_interpreters import make_environment, see_our_packages

from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.errors import UserError
from rl_train.pools.actor_pool import ActorPool


@pytest.mark.slow
def test_workers_run_under_the_named_python(local_ray, tmp_path):
    folder = make_environment(tmp_path / "other")
    python = see_our_packages(folder)
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
        bare = make_environment(tmp_path / "bare") / "bin" / "python"
        for python, word in [(tmp_path / "none", "does not exist"), (Path("/bin/true"), "does not behave"), (bare, "install")]:
            with pytest.raises(UserError, match=word):
                RayWorkerGroup(cluster, Worker, python=python)
