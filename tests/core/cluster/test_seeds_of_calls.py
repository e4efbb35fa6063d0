"""The generators of a worker process are seeded for each call that samples or trains, so that a resumed run draws the same."""

import random

import numpy
import pytest
import torch
from ray import cloudpickle

from rl_core.cluster.actor_host import ActorHost
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.process_seed import seed_process
from rl_core.errors import WorkerError
from rl_core.interfaces.worker import GenerationRequest
from rl_core.interfaces.worker_context import WorkerContext


class Sampler:
    """Draws from the generators of the process."""

    def get_weight_version(self):
        return 0

    def generate(self, data, *, greedy=False):
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
        return self.generate(None)


@pytest.fixture(autouse=True)
def _generators():
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def calls():
    """Makes a worker process's host, here in this process, and calls a method of its worker."""

    def host(seed=5, rank=0):
        made = ActorHost.__new__(ActorHost)  # without the process's signal handlers
        context = WorkerContext(
            rank=rank,
            world_size=2,
            local_rank=rank,
            node_rank=0,
            master_address="127.0.0.1",
            master_port=1,
            coords={"data": rank},
            device="cpu",
            num_threads=torch.get_num_threads(),
            seed=seed,
        )
        assert made.build(cloudpickle.dumps((Sampler, {})), context, {}) is None
        return lambda method, *args, **kwargs: made.call(method, (args, kwargs), True)

    return host


def rows(*seeds):
    return BatchedDataDict({"sample_seeds": torch.tensor(seeds)})


def arrival(seed):
    return GenerationRequest(name=f"row {seed}", row=rows(seed))


def test_the_rows_of_a_call_decide_what_a_worker_draws_whatever_it_did_before(calls):
    call = calls()
    first = call("generate", rows(1, 2), greedy=False)
    other = call("generate", rows(1, 3), greedy=False)
    assert [a == b for a, b in zip(first, other, strict=True)] == [False] * 3
    assert call("generate", rows(1, 2), greedy=True) == first
    assert calls(rank=1)("generate", rows(1, 2)) == first  # rows of a replica that exited are sampled again by another one
    assert calls(seed=6)("generate", rows(1, 2)) != first


def test_calls_without_seeds_continue_the_generators(calls):
    call = calls()
    without = BatchedDataDict({"input_ids": torch.ones(1, 1, dtype=torch.int64)})
    assert len({call("generate", without) for _ in range(3)}) == 3


def test_a_poll_is_seeded_by_its_arrivals_and_one_without_arrivals_continues_the_rows_in_progress(calls):
    call = calls()
    begun = call("poll", [arrival(1), arrival(2)], wait_s=0.0)
    then = [call("poll", [], cancelled=["row 1"], wait_s=0.0) for _ in range(2)]
    assert len({begun, *then}) == 3
    assert call("poll", [arrival(2), arrival(1)]) != begun
    assert call("poll", [arrival(1), arrival(2)]) == begun
    assert [call("poll", []) for _ in range(2)] == then


def test_polls_in_the_drivers_process_continue_each_other_and_leave_its_generators_to_other_components():
    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    seed_process(1)
    expected = [draw() for _ in range(3)]
    call = InProcessWorkerGroup(Sampler).run_one
    begun, *then = call("poll", [arrival(1)]), call("poll", []), call("poll", [])
    assert len({begun, *then}) == 3
    assert call("poll", [arrival(3)]) != begun
    seed_process(1)
    found = [draw()]
    assert call("poll", [arrival(1)]) == begun
    for drawn in then:
        found.append(draw())
        assert call("poll", []) == drawn
    assert found == expected


def test_a_poll_in_the_drivers_process_that_fails_leaves_its_generators():
    class Failing(Sampler):
        def poll(self, arrivals, **options):
            raise ValueError(self.generate(None))

    seed_process(1)
    expected = torch.rand(())
    seed_process(1)
    with pytest.raises(WorkerError, match="ValueError"):
        InProcessWorkerGroup(Failing).run_one("poll", [arrival(1)])
    assert torch.rand(()) == expected


def test_whole_batches_are_seeded_in_the_drivers_process():
    call = InProcessWorkerGroup(Sampler).run_one
    first = call("generate", rows(1, 2))
    call("poll", [arrival(1)])
    assert call("generate", rows(1, 2)) == first
