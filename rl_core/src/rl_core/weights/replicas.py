"""Compares the weights of the replicas of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_core.errors import WeightSyncError
from rl_core.weights.fingerprint import describe_differences


def same_digests_on_every_replica(per_replica: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Name to digest, equal on all replicas.

    Raises:
        WeightSyncError: a replica differs from the first; names the tensors.
    """
    first = per_replica[0]
    for rank, digests in enumerate(per_replica[1:], 1):
        lines = describe_differences(first, digests, sides=("replica 0", f"replica {rank}"))
        if lines:
            raise WeightSyncError("The generation replicas do not have the same weights:\n  " + "\n  ".join(lines))
    return dict(first)
