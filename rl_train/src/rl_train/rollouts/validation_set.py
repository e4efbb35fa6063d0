"""Validation data with the period of its validations and the names of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.evaluate import Evaluation

_AREA = "validation/"


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Validation data of a run: prompts that are sampled and scored, rows on which the loss is computed, or both."""

    name: str = ""
    """Key in `data.validation_sets`; empty for `data.validation`."""
    val_period: int
    """Number of steps between validations; 0 for none."""
    evaluation: Evaluation | None = None
    """Evaluation on the prompts."""
    batches: TrainingBatches | None = None
    """Supervised batches."""

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics `validation/x` as `validation/<name>/x`; unchanged for `data.validation`."""
        prefix = f"{_AREA}{self.name}/" if self.name else _AREA
        return {prefix + name.removeprefix(_AREA): value for name, value in metrics.items()}
