"""Peak memory of each phase, of processes of Ray and of this process."""

import os
import signal
import sys

import numpy as np
import pytest
from ray import cloudpickle

from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import PolicyConfig
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.interfaces.worker import MeasuredWorker
from rl_train.metrics.measured import PeakMemory, Recorder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class MemoryWorker(MeasuredWorker):
    """Uses the requested amount of memory."""

    def __init__(self, context, config):
        self.rank, self.world_size = context.rank, context.world_size

    def setup(self):
        return {}

    def use(self, mib):
        """The last rank holds `mib` MiB until it returns."""
        if self.rank == self.world_size - 1:
            np.ones(mib * 2**20, dtype=np.uint8)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def recorder_of(*components):
    recorder = Recorder()
    recorder.memory = PeakMemory(components, deadline_s=60.0)
    return recorder


def facade(**options):
    return WorkerFacade(worker_class=MemoryWorker, config=PolicyConfig(backend="x", model_name="m"), **options)


@pytest.fixture(scope="module")
def two_ranks(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        workers = facade(cluster=cluster)
        yield workers
        workers.shutdown()


@pytest.mark.slow
def test_a_phase_has_the_peak_of_its_largest_rank_and_not_that_of_other_phases(two_ranks):
    recorder = recorder_of(two_ranks, object())  # a component without workers is not measured
    two_ranks.group.run_all("use", 900)  # such as for a checkpoint
    recorder.memory.start()
    with recorder.timed("score"):
        two_ranks.group.run_all("use", 1)
    for mib in (600, 200):
        with recorder.timed("train"):
            two_ranks.group.run_all("use", mib)
    numbers = recorder.flush()
    assert {name for name in numbers if name.startswith("memory/")} == {"memory/score_gib", "memory/train_gib"}
    assert numbers["memory/train_gib"] - numbers["memory/score_gib"] == pytest.approx(600 / 1024, abs=0.05)
    assert recorder.flush() == {}


def test_components_in_this_process_are_measured_together():
    policy, engine = facade(), facade()
    recorder = recorder_of(policy, engine)
    with recorder.timed("train"):
        policy.group.run_all("use", 300)
    with recorder.timed("score"):
        pass
    numbers = recorder.flush()
    assert numbers["memory/train_gib"] - numbers["memory/score_gib"] == pytest.approx(300 / 1024, abs=0.05)


def test_a_rank_that_has_died_is_left_out(two_ranks):
    recorder = recorder_of(two_ranks)
    two_ranks.group.submit_one("die", rank=1)
    with recorder.timed("score"):
        two_ranks.group.run_one("use", 1, rank=0)
    assert recorder.flush()["memory/score_gib"] > 0
