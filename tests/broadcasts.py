"""Sends the weights of a policy with several ranks over a real collective, and records which collectives each rank starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.weights.collective import WeightCollective
from rl_core.weights.source import WeightSource

TIMEOUT_S = 60.0

Call = tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Name of a collective, the ranks of its group, and the shapes of its tensors."""


class RecordedCollectives(TorchDispatchMode):
    """Records the collectives that this rank starts within the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs or {}))
            group = next((ranks for leaf in leaves if (ranks := _ranks_of(leaf))), ())
            if group:
                shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
                self.calls.append((str(func), group, shapes))
        return func(*args, **(kwargs or {}))


def _ranks_of(argument: Any) -> tuple[int, ...]:
    """The ranks of a process group, given by name or as an object; empty for any other argument."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
        except (RuntimeError, ValueError):
            return ()
    if isinstance(argument, str) and argument.isdigit():
        return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument)))
    return ()


def broadcast(worker: WeightSource, *, budget_bytes: int, port: int) -> dict[str, Any]:
    """Send the weights in one refit, from this rank.

    Args:
        worker: a rank of the policy.
        budget_bytes: maximum size of a bucket.
        port: a free port for the weight collective.

    Returns:
        `calls`: the collectives of the refit; `one_pass`: those of a single pass over all weights; on rank 0 `sent` and
        `received`, name to tensor; `refits`: refits that the receiver saw.
    """
    with RecordedCollectives() as recorded:
        sent = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    one_pass = list(recorded.calls)
    recorded.calls.clear()
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
        with recorded:
            worker.broadcast_weights_for_collective()
        if receiving is not None:
            receiving.result()
    worker.leave_refit()
    return {"calls": recorded.calls, "one_pass": one_pass, "sent": sent, "received": received, "buckets": buckets}


def assert_lockstep(ranks: Sequence[Mapping[str, Any]]) -> None:
    """All ranks of a group started the same collectives of that group, in the same order, as in one pass over the weights."""
    for found in ranks:
        assert found["calls"] == found["one_pass"], "a module was gathered twice, or not at all"
    for first, second in combinations(ranks, 2):
        groups = {group for _, group, _ in first["calls"]} & {group for _, group, _ in second["calls"]}
        shared = [[call for call in found["calls"] if call[1] in groups] for found in (first, second)]
        assert shared[0] == shared[1]


def assert_all_arrived(rank: Mapping[str, Any]) -> None:
    """What the receiver got is what a single pass over the weights yields, bit for bit."""
    assert rank["received"].keys() == rank["sent"].keys()
    assert [name for name, tensor in rank["sent"].items() if not torch.equal(tensor, rank["received"][name])] == []
