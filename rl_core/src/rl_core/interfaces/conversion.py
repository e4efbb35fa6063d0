"""Conversion of a policy backend's checkpoints to other formats; no logic.

A policy class lists its conversions in `checkpoint_conversions`: format to "module:function". The function takes a `Conversion`
and fills its `output`. Transformers folders, in a checkpoint or by themselves, are copied without such a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One conversion.

    Attributes:
        source: the weights that `save_checkpoint` wrote, or a Transformers folder from elsewhere.
        output: an empty folder to fill; it gets its final name once the function returns.
        policy: the section `policy` that the checkpoint was written under, as plain values; empty for a folder from elsewhere.
        merge: merge adapters into the base weights.
        model: the base model's location, overriding the one that `policy` and the adapters name.
    """

    source: Path
    output: Path
    policy: Mapping[str, Any]
    merge: bool = False
    model: str | None = None
