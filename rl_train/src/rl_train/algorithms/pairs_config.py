"""What the sections of algorithms on pairs of answers have in common. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rl_core.config.source_tree import KeyPath
from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.runtime_needs import RecordNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig, RunConfig


class PairsConfig(AlgorithmConfig):
    """Base of the sections of algorithms that train on pairs: two rows each, the chosen answer first."""

    records_key: ClassVar[str | None] = "global_batch_size"

    global_batch_size: int = Field(default=32, ge=1)
    """Number of pairs per step; the last step of an epoch may have fewer. `policy.train_global_batch_size` (in rows, two per
    pair) splits them into optimizer steps."""
    val_batch_size: int = Field(default=128, ge=1)
    """Number of pairs per validation batch."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(records=RecordNeeds(records_per_step=self.global_batch_size, pairs=True))

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=2 * self.global_batch_size, rows_per_unit=2)

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        rows = run.policy.train_global_batch_size
        if rows is not None and rows % 2:
            yield ("policy", "train_global_batch_size"), f"{rows} rows would split a pair (two rows): set an even number."
