"""Records which collectives each rank starts: ranks that start them in another order wait for each other forever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_POINT_TO_POINT = ("send", "recv")
_UNEVEN = ("gather_", "scatter_", "alltoall", "all_to_all")
"""Collectives in which each rank may have other sizes."""

Call = tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Name of a collective, the ranks of its group, and the shapes of its tensors."""


class RecordedCollectives(TorchDispatchMode):
    """Records the collectives that this rank starts within the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._opname.startswith(_POINT_TO_POINT):
            leaves = tree_leaves((args, kwargs or {}))
            group = next((ranks for leaf in leaves if (ranks := _ranks_of(leaf))), ())
            if group:
                shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
                self.calls.append((func._opname, group, () if func._opname.startswith(_UNEVEN) else shapes))
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


def calls_of(method: Callable[..., object], *args: Any, **kwargs: Any) -> list[Call]:
    """The collectives that a call starts on this rank; its result is dropped."""
    with RecordedCollectives() as recorded:
        method(*args, **kwargs)
    return recorded.calls


def calls_of_methods(worker: Any, rows: Any, loss_fn: Any, counts: Any, folder: Path) -> dict[str, list[Call]]:
    """The collectives of the methods of a policy worker that all its ranks are called with, by method."""
    weights, optimizer = folder / "weights", folder / "optimizer"
    return {
        "get_logprobs": calls_of(worker.get_logprobs, rows),
        "train": calls_of(worker.train, rows, loss_fn, counts=counts),
        "weight_fingerprint": calls_of(worker.weight_fingerprint),
        "save_checkpoint": calls_of(worker.save_checkpoint, weights, optimizer),
        "load_checkpoint": calls_of(worker.load_checkpoint, weights, optimizer),
    }


def with_two_swapped(calls: Sequence[Call]) -> list[Call] | None:
    """The calls with two different ones of one group in the other order; None if no two follow each other."""
    for number, (first, second) in enumerate(pairwise(calls)):
        if first != second and first[1] == second[1]:
            return [*calls[:number], second, first, *calls[number + 2 :]]
    return None


def assert_lockstep(ranks: Sequence[Sequence[Call]]) -> None:
    """All ranks of a group start the same collectives of that group, in the same order."""
    for first, second in combinations(ranks, 2):
        groups = {group for _, group, _ in first} & {group for _, group, _ in second}
        shared = [[call for call in calls if call[1] in groups] for calls in (first, second)]
        assert shared[0] == shared[1]
