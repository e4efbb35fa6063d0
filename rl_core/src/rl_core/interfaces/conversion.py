"""What a policy backend is asked for when a checkpoint of its is to become files of another format; no logic.

A policy class says what it can convert to in `checkpoint_conversions`: format to "module:function". The function takes a
`Conversion` and fills its `output`. A folder of Transformers, in a checkpoint or by itself, needs no function to be copied.
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
        source: what `save_checkpoint` wrote as weights, or a folder of Transformers that no run wrote.
        output: an empty folder to fill; it gets its final name once the function returns.
        policy: the section `policy` that the checkpoint was written under, as plain values; empty where no run wrote it.
        merge: fold adapters into the weights that they belong to.
        model: where the model is that the run began from, in place of what `policy` and adapters name.
    """

    source: Path
    output: Path
    policy: Mapping[str, Any]
    merge: bool = False
    model: str | None = None
