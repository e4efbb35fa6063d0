"""Workers that have several bundles each, on a Ray that believes in GPUs; what a process sees is what Ray gave out."""

from __future__ import annotations

import psutil
import pytest
import ray
from cluster_workers import Worker
from ray.cluster_utils import Cluster

from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.errors import ResourceInsufficientError


@pytest.fixture(scope="module")
def nodes():
    """Two nodes on this machine, one with four GPUs and one with two, as far as Ray can tell."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=2, num_gpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def gpus_of(environ):
    return set(environ["CUDA_VISIBLE_DEVICES"].split(","))


def test_a_worker_of_two_bundles_sees_the_gpus_of_both_and_nobody_elses(nodes):
    with RayVirtualCluster([4], use_gpus=True, max_colocated_worker_groups=2) as cluster:
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        with (
            RayWorkerGroup(cluster, Worker, bundles_per_worker=2, name="sampler") as pairs,
            RayWorkerGroup(cluster, Worker, name="trainer") as singles,
        ):
            seen = [gpus_of(environ) for environ in pairs.run_all("environ")]
            assert [len(gpus) for gpus in seen] == [2, 2]
            assert set.union(*seen) == {"0", "1", "2", "3"}
            # Bundles are given in rank order: trainers 0 and 1 are on the GPUs of sampler 0.
            alone = [gpus_of(environ) for environ in singles.run_all("environ")]
            assert [alone[0] | alone[1], alone[2] | alone[3]] == seen
            pairs.restart(0)
            assert gpus_of(pairs.run_one("environ")) == seen[0]
        assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_bundles_that_are_too_few_or_lie_on_two_nodes_are_refused_with_what_to_change(nodes):
    with RayVirtualCluster([3, 1], use_gpus=True) as cluster:
        with pytest.raises(ResourceInsufficientError, match="bundles of worker 1 lie on 2 nodes"):
            RayWorkerGroup(cluster, Worker, bundles_per_worker=2, num_workers=2)
        with pytest.raises(ResourceInsufficientError, match=r"2 workers of 3 bundles each were asked for, .* has 4 bundles"):
            RayWorkerGroup(cluster, Worker, bundles_per_worker=3, num_workers=2)
