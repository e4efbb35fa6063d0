"""Base section of algorithms: the keys that all algorithms share, and what each one declares. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_core.config.section import Section
from rl_core.config.source_tree import KeyPath
from rl_train.config.runtime_needs import RuntimeNeeds


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How an algorithm trains a model, according to its section."""

    steps: int
    """Number of steps in which the model is trained."""
    rows: int
    """Number of rows per step; the maximum if it varies."""
    passes: int = 1
    """Number of passes over the rows of a step."""
    rows_per_unit: int = 1
    """Number of adjacent rows that must stay together: two for a pair."""
    is_exact: bool = True
    """Whether every step has exactly `rows` rows."""


class AlgorithmConfig(Section):
    """Base section of every algorithm."""

    default_loss: ClassVar[str | None] = None
    """Name of the loss used if `loss_fn` names none. If this is None, `loss_fn.name` is required."""
    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """Head type of the model that the algorithm trains; the default of `policy.head`."""
    allows_filtered_sampling: ClassVar[bool] = False
    """Whether the algorithm may train on samples drawn with top-p or top-k, with log-probabilities of the filtered
    distribution."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Capabilities that the policy or the engine must have, such as those of the algorithm's own plugin (`acme:name`)."""
    records_key: ClassVar[str | None] = None
    """Key of the number of records per step, which a Python trainer lowers to the size of the dataset unless it is set."""

    max_num_steps: int = Field(default=100, ge=1)
    """Total number of steps, including the steps before a resume."""
    max_num_epochs: int | None = Field(default=None, ge=1)
    """Maximum number of passes over the training data. The run ends after them if that comes before `max_num_steps`."""
    seed: int = 42
    """Random seed for data order, sampling and initialization."""
    val_period: int = Field(default=0, ge=0)
    """Number of steps between validations; 0 disables periodic validation."""
    val_at_start: bool = False
    """Whether to validate before the first step."""
    val_at_end: bool = False
    """Whether to validate after the last step."""
    val_batch_size: int = Field(default=256, ge=1)
    """Number of rows per validation batch."""
    max_val_samples: int | None = Field(default=None, ge=1)
    """Number of validation records to use, from the start of the data; all by default."""

    def for_records(self, count: int) -> Self:
        """This section with at most `count` records per step, unless `records_key` is set."""
        key = self.records_key
        if key is None or key in self.model_fields_set or getattr(self, key) <= count:
            return self
        return self.model_copy(update={key: count})

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """What the algorithm needs from the runtime. Every algorithm must implement it.

        Raises:
            NotImplementedError: The section's model does not implement it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement the property `runtime_needs`, which declares how many prompts or records a "
            "step takes. See docs/custom_losses_and_algorithms.md"
        )

    @model_validator(mode="after")
    def _declares_its_needs(self) -> AlgorithmConfig:
        # Evaluated here so that no worker is started for an algorithm with a missing or invalid declaration.
        _ = self.runtime_needs
        return self

    @property
    def needs_generation(self) -> bool:
        """Whether the algorithm trains on rollouts, so that the config must have `policy.generation`."""
        return self.runtime_needs.rollouts is not None

    @property
    def needs_rewards(self) -> bool:
        """Whether its rollouts must be scored, so that the config must have a section `env`."""
        rollouts = self.runtime_needs.rollouts
        return rollouts is None or rollouts.rewarded

    @property
    def needs_preferences(self) -> bool:
        """Whether its records are pairs of a chosen and a rejected answer."""
        records = self.runtime_needs.records
        return records is not None and records.pairs

    def conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Yield each key of another section that the algorithm does not support, with the reason.

        `run` is the whole config, a `rl_train.config.schema.RunConfig`.
        """
        yield from ()

    def training_plan(self, model: str, run: Any) -> TrainingPlan | None:
        """How the algorithm trains the model of a section (`policy`, `value`), for schedules that count optimizer steps.

        `run` is the whole config. None, the default, means unknown: a schedule must then set its own length.
        """
        return None
