"""What the ranks of a policy or the replicas of an engine answered, as one answer; for the facades, which know no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rl_core.errors import WeightSyncError
from rl_core.weights.fingerprint import describe_differences

T = TypeVar("T")


def same_on_every_replica(answers: Sequence[T], *, what: str) -> T:
    """The one answer that all replicas gave.

    Raises:
        WeightSyncError: they differ; says which replica gave what.
    """
    if any(answer != answers[0] for answer in answers):
        given = "; ".join(f"replica {rank}: {answer}" for rank, answer in enumerate(answers))
        raise WeightSyncError(f"The generation replicas differ in their {what} ({given}).")
    return answers[0]


def same_digests_on_every_replica(per_replica: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Name to digest, of all replicas at once.

    Raises:
        WeightSyncError: replicas differ; names the tensors in which each differs from the first.
    """
    first = per_replica[0]
    for rank, digests in enumerate(per_replica[1:], 1):
        if digests != first:
            lines = describe_differences(first, digests)
            raise WeightSyncError(f"Generation replica {rank} holds other weights than replica 0:\n" + "\n".join(lines))
    return dict(first)
