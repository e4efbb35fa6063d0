"""The GPUs that torch sees in worker processes."""

from __future__ import annotations

import sys

import pytest
import torch
from ray import cloudpickle

from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.interfaces.worker_context import WorkerContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("local_ray"),
]


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a module of tests


class Looks:
    """Reports the GPUs of its process."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def gpus(self):
        import torch

        count = torch.cuda.device_count()
        return self.context.device, [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]

    def computes(self):
        import torch

        return float((torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum())


def test_groups_that_share_a_bundle_see_its_gpu_and_no_other():
    with (
        RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=3) as cluster,
        RayWorkerGroup(cluster, Looks) as one,
        RayWorkerGroup(cluster, Looks) as other,
    ):
        [(device, seen)] = one.run_all("gpus")
        assert device == "cuda"
        assert len(seen) == 1
        assert other.run_all("gpus") == [("cuda", seen)]
        assert one.run_all("computes") == other.run_all("computes") == [512.0]


def test_every_rank_has_its_own_gpu():
    count = torch.cuda.device_count()
    with RayVirtualCluster([count], use_gpus=True) as cluster, RayWorkerGroup(cluster, Looks) as group:
        found = group.run_all("gpus")
        assert {len(seen) for _, seen in found} == {1}
        assert len({seen[0] for _, seen in found}) == count


def test_a_group_on_cpus_sees_none():
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Looks) as group:
        assert group.run_all("gpus") == [("cpu", [])]
