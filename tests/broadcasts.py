"""Sends the weights of a policy with several ranks over a real collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from recorded_collectives import assert_lockstep, calls_of

from rl_core.weights.collective import WeightCollective
from rl_core.weights.source import WeightSource

TIMEOUT_S = 60.0


def broadcast(worker: WeightSource, *, budget_bytes: int, port: int) -> dict[str, Any]:
    """Send the weights in one refit, from this rank.

    Args:
        worker: a rank of the policy.
        budget_bytes: maximum size of a bucket.
        port: a free port for the weight collective.

    Returns:
        `calls`: the collectives of the refit; `one_pass`: the collectives of a single pass over all weights; `sent` and, on
        rank 0, `received`: name to tensor; `buckets`: their names.
    """
    sent: dict[str, torch.Tensor] = {}
    one_pass = calls_of(lambda: sent.update({name: tensor.clone() for name, tensor in worker.iter_weights()}))
    buckets = worker.prepare_weights_for_ipc(budget_bytes)
    received: dict[str, torch.Tensor] = {}

    def receive() -> None:
        collective = WeightCollective("127.0.0.1", port, 2, rank=1, device="cpu", timeout_s=TIMEOUT_S)
        collective.join()
        collective.receive(lambda tensors, *_: received.update({name: tensor.clone() for name, tensor in tensors.items()}))
        collective.close()

    with ThreadPoolExecutor(1) as beside:
        receiving = beside.submit(receive) if worker.context.rank == 0 else None
        worker.init_collective("127.0.0.1", port, 2, timeout_s=TIMEOUT_S)
        calls = calls_of(worker.broadcast_weights_for_collective)
        if receiving is not None:
            receiving.result()
    worker.leave_refit()
    return {"calls": calls, "one_pass": one_pass, "sent": sent, "received": received, "buckets": buckets}


def assert_gathered_once(ranks: Sequence[Mapping[str, Any]]) -> None:
    """The refit has the collectives of a single pass over the weights, on all ranks in the same order."""
    for found in ranks:
        assert found["calls"] == found["one_pass"], "a module was gathered twice, or not at all"
    assert_lockstep([found["calls"] for found in ranks])


def assert_all_arrived(rank: Mapping[str, Any]) -> None:
    """What the receiver got is what a single pass over the weights yields, bit for bit."""
    assert rank["received"].keys() == rank["sent"].keys()
    assert [name for name, tensor in rank["sent"].items() if not torch.equal(tensor, rank["received"][name])] == []
