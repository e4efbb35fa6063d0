"""Eight ranks of a Megatron policy start the same collectives in one order; torch's `fake` process group communicates nothing.

Without pipeline stages, because a stage reads the shape of its input from the one before it.
"""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from megatron_cases import NLL, counts_of, make_context, make_rows
from recorded_collectives import assert_lockstep, calls_of, with_two_swapped
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_backends_megatron import parallel
from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.policy import grid
from rl_backends_megatron.worker import MegatronPolicyWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
WORLD = 8
LAYOUTS = {
    "tp2, sharded optimizer state": {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
    "tp2, sequence parallel, cp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
}


def join(context, *_, **__):
    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.world_size)


def iter_weights_in_another_order(worker):
    """All weights, of which two matrices of different shapes are gathered in the other order. Changes the worker."""
    [exports], exported = worker._model.bridge._exports, worker._model.bridge._exported
    matrices = [number for number, export in enumerate(exports) if len(export.shapes[0]) == 2]
    first = matrices[0]
    other = next(number for number in matrices if exports[number].shapes != exports[first].shapes)
    for entries in (exports, exported):
        entries[first], entries[other] = entries[other], entries[first]
    return worker.iter_weights()


def calls_of_rank(rank, model, layout):
    """The collectives of each method on one rank."""
    config = MegatronPolicyConfig(model_name=str(model), megatron_cfg=MegatronConfig(**layout))
    worker = MegatronPolicyWorker(make_context(rank, WORLD, run_in_process=False), config)
    try:
        worker.setup()
        rows, named = make_rows(2 * WORLD), grid(config.megatron_cfg, WORLD)
        shard = rows.shard_by_batch_size(named.get_axis_size("data"))[named.get_worker_coords(rank)["data"]]
        return {
            "get_logprobs": calls_of(worker.get_logprobs, shard),
            "train": calls_of(worker.train, shard, NLL(), counts=counts_of(rows)),
            "iter_weights": calls_of(lambda: list(worker.iter_weights())),
            "weight_fingerprint": calls_of(worker.weight_fingerprint),
            "iter_weights in another order": calls_of(lambda: list(iter_weights_in_another_order(worker))),
        }
    finally:
        worker.shutdown()
        parallel.leave()


@pytest.fixture(scope="module", params=LAYOUTS)
def recorded(request, models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_backends_base.parallel.join_process_group", join)
        # Megatron asks for further groups of gloo, which would connect.
        new_group = functools.wraps(dist.new_group)(
            lambda *args, backend=None, pg_options=None, make=dist.new_group, **kwargs: make(*args, **kwargs)
        )
        patch.setattr(dist, "new_group", new_group)
        return [calls_of_rank(rank, models / "llama-tied", LAYOUTS[request.param]) for rank in range(WORLD)]


def test_one_rank_that_gathers_two_weights_in_the_other_order_is_found(recorded):
    calls = [rank["iter_weights"] for rank in recorded]
    with pytest.raises(AssertionError):
        assert_lockstep([*calls[:5], recorded[5]["iter_weights in another order"], *calls[6:]])


@pytest.mark.parametrize("method", ["get_logprobs", "train", "iter_weights", "weight_fingerprint"])
def test_eight_ranks_start_the_same_collectives_in_one_order(recorded, method):
    calls = [rank[method] for rank in recorded]
    assert len(calls[0]) > 2
    assert_lockstep(calls)
    swapped = with_two_swapped(calls[5])
    assert swapped is not None
    with pytest.raises(AssertionError):
        assert_lockstep([*calls[:5], swapped, *calls[6:]])
