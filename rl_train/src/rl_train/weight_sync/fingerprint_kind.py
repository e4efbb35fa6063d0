"""Reads the algorithm of a fingerprint from its text."""

from __future__ import annotations

from typing import get_args

from rl_core.errors import WeightSyncError
from rl_core.weights.fingerprint import Kind


def kind_of(fingerprint: str) -> Kind:
    """The kind of a combined digest.

    Raises:
        WeightSyncError: it is not a combined digest of this module.
    """
    kind = fingerprint.partition(":")[0]
    if kind not in get_args(Kind):
        raise WeightSyncError(
            f"The fingerprint {fingerprint!r} does not start with any of {', '.join(get_args(Kind))}: it was not created by "
            "rl_core.weights.fingerprint, so it cannot be compared."
        )
    return kind  # type: ignore[return-value]
