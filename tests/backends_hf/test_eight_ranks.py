"""All eight ranks of a sharded policy start the same collectives; recorded one rank after the other, without communication."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from recorded_collectives import RecordedCollectives, assert_lockstep, calls_of, in_another_order, with_two_swapped
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_backends_base import parallel
from rl_backends_hf.training.worker import HFPolicyWorker

WORLD = 8


def join(context, *_, **__):
    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.world_size)


@pytest.fixture(scope="module")
def recorded(parts, model_folder):
    """The collectives of each method, for each rank."""
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "join_process_group", join)
        for rank in range(WORLD):
            config = parts.make_config(model_folder("llama-tied"), hf={"data_parallel": "fsdp2"}, optimizer=parts.SGD)
            worker = HFPolicyWorker(parts.make_context(rank, WORLD), config)
            worker.setup()
            rows = parts.make_rows(2 * WORLD)
            shard = rows.shard_by_batch_size(WORLD)[rank]
            ranks.append(
                {
                    "get_logprobs": calls_of(worker.get_logprobs, shard),
                    "train": calls_of(worker.train, shard, parts.NLL(), counts=parts.counts_of(rows)),
                    "iter_weights": calls_of(lambda worker=worker: list(worker.iter_weights())),
                    "iter_weights in another order": calls_of(
                        lambda worker=worker: list(worker.iter_weights(in_another_order(worker)))
                    ),
                    "weight_fingerprint": calls_of(worker.weight_fingerprint),
                }
            )
            dist.destroy_process_group()
    return ranks


@pytest.mark.slow
def test_one_rank_that_gathers_two_weights_in_the_other_order_is_found(recorded):
    calls = [rank["iter_weights"] for rank in recorded]
    with pytest.raises(AssertionError):
        assert_lockstep([*calls[:5], recorded[5]["iter_weights in another order"], *calls[6:]])


@pytest.mark.parametrize("method", ["get_logprobs", "train", "iter_weights", "weight_fingerprint"])
def test_eight_ranks_start_the_same_collectives_in_one_order(recorded, method):
    calls = [rank[method] for rank in recorded]
    assert {call[1] for call in calls[0]} == {tuple(range(WORLD))}
    assert_lockstep(calls)
    with pytest.raises(AssertionError):
        assert_lockstep([*calls[:5], with_two_swapped(calls[5]), *calls[6:]])


def record(rank, work, *, world=3):
    join(SimpleNamespace(rank=rank, world_size=world))
    try:
        with RecordedCollectives() as recorded:
            work(rank)
    finally:
        dist.destroy_process_group()
    return recorded.calls


def gather(rank, *, of_rank_1=2):
    size = of_rank_1 if rank == 1 else 2
    dist.all_gather([torch.empty(size) for _ in range(3)], torch.empty(size))


def scatter(rank, *, of_rank_2=3):
    parts = [torch.empty(1), torch.empty(2), torch.empty(3)] if rank == 0 else None
    dist.scatter(torch.empty(of_rank_2 if rank == 2 else rank + 1), parts)


def exchange(rank, *, swapped=()):
    for size in (5, 7):
        if rank == 0:
            dist.send(torch.empty(size), 2)
        if rank == 2:
            dist.recv(torch.empty(12 - size if 2 in swapped else size), 0)


@pytest.mark.parametrize(
    ("work", "matches"),
    [
        (gather, True),
        (lambda rank: gather(rank, of_rank_1=3), False),
        (scatter, True),
        (lambda rank: scatter(rank, of_rank_2=4), False),
        (exchange, True),
        (lambda rank: exchange(rank, swapped=(2,)), False),
    ],
    ids=["gather", "wrong gather", "scatter", "wrong scatter", "sent", "received in another order"],
)
def test_each_rank_receives_the_shapes_that_the_others_send(work, matches):
    calls = [record(rank, work) for rank in range(3)]
    assert any(calls)
    if matches:
        assert_lockstep(calls)
    else:
        with pytest.raises(AssertionError):
            assert_lockstep(calls)
