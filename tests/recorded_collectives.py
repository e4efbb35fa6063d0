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

Shapes = tuple[tuple[int, ...], ...]
Call = tuple[str, tuple[int, ...], Shapes, tuple[Shapes, Shapes], int | None]
"""Name of a collective, the ranks of its group, the shapes that are equal on all ranks, those that this rank sends to and
receives from each rank if they may differ, and the other rank of a point-to-point call."""

_SENT, _RECEIVED = 0, 1
_UNEVEN = {"allgather_": (1, 0), "gather_": (1, 0), "scatter_": (1, 0), "alltoall_": (1, 0), "alltoall_base_": (4, 3)}
"""Collectives in which ranks may have different shapes, and the arguments with what a rank sends and receives."""
_POINT_TO_POINT = ("send", "recv_")


class RecordedCollectives(TorchDispatchMode):
    """Records the collectives and point-to-point calls that this rank starts within the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs or {}))
            group = next((ranks for leaf in leaves if (ranks := _ranks_of(leaf))), ())
            if group:
                self.calls.append(_call(func._opname, group, args, leaves))
        return func(*args, **(kwargs or {}))


def _call(name: str, group: tuple[int, ...], args: tuple[Any, ...], leaves: Sequence[Any]) -> Call:
    if name in _UNEVEN:
        sent, received = (_shapes(args[position]) for position in _UNEVEN[name])
        return name, group, (), (sent, received), None
    if name in _POINT_TO_POINT:
        shapes = _shapes(args[0])
        return name, group, (), (shapes, shapes), group[args[2]]
    return name, group, _shapes([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]), ((), ()), None


def _shapes(values: Any) -> Shapes:
    """Shapes of tensors, or split sizes."""
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (leaf,)
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) or type(leaf) is int
    )


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


def in_another_order(worker: Any) -> list[str]:
    """The names of a worker's weights, of which the first two matrices of different shapes are swapped."""
    shapes = {name: tuple(shape) for name, (shape, _) in worker.prepare_refit_info().items()}
    first = next(name for name, shape in shapes.items() if len(shape) == 2)
    other = next(name for name, shape in shapes.items() if len(shape) == 2 and shape != shapes[first])
    swapped = {first: other, other: first}
    return [swapped.get(name, name) for name in shapes]


def assert_lockstep(ranks: Sequence[Sequence[Call]]) -> None:
    """All ranks of a group start the same collectives in one order, and each rank receives what the others send.

    Args:
        ranks: the calls of each rank of the whole world, in the order of ranks.
    """
    for first, second in combinations(range(len(ranks)), 2):
        groups = {call[1] for call in ranks[first]} & {call[1] for call in ranks[second]}
        shared = [[call for call in ranks[rank] if call[1] in groups and call[4] is None] for rank in (first, second)]
        assert [call[:3] for call in shared[0]] == [call[:3] for call in shared[1]]
        for (_, group, _, one, _), (*_, other, _) in zip(*shared, strict=True):
            _assert_matching(one, other, group.index(first), group.index(second), len(group))
            _assert_matching(other, one, group.index(second), group.index(first), len(group))
        for source, target in ((first, second), (second, first)):
            assert _passed(ranks[source], target, "send") == _passed(ranks[target], source, "recv_")


def _assert_matching(
    sender: tuple[Shapes, Shapes], receiver: tuple[Shapes, Shapes], source: int, target: int, size: int
) -> None:
    """What one rank of a group sends to another is what that one receives from it; several shapes are those of each rank."""
    sent, received = sender[_SENT], receiver[_RECEIVED]
    if sent and received and size in (len(sent), len(received)):
        assert sent[target if len(sent) == size else 0] == received[source if len(received) == size else 0]


def _passed(calls: Sequence[Call], peer: int, name: str) -> list[Shapes]:
    """Shapes of all tensors that were sent to a rank, or received from it, in order."""
    return [call[3][_SENT] for call in calls if call[0] == name and call[4] == peer]
