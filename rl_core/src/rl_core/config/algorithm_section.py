"""The section of an algorithm: the keys that all have, and what each declares of itself; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from rl_core.config.optimizer_steps import TrainingPlan
from rl_core.config.runtime_needs import RuntimeNeeds
from rl_core.config.section import Section
from rl_core.config.written import Path

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig


class AlgorithmConfig(Section):
    """What every algorithm's section has."""

    default_loss: ClassVar[str | None] = None
    """The loss component that `loss_fn` means when it names none; without one, `loss_fn.name` is required."""
    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """What the model that it trains ends in; `policy.head` means it where the file does not say."""
    allows_filtered_sampling: ClassVar[bool] = False
    """Whether it may train on samples drawn with top-p or top-k, whose log-probabilities are of the filtered distribution."""

    max_num_steps: int = Field(default=100, ge=1)
    """Steps to run in all, resumed ones included."""
    max_num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data after which the run ends, if that comes before `max_num_steps`."""
    seed: int = 42
    """Seed of everything that is drawn: data order, sampling, initialisation."""
    val_period: int = Field(default=0, ge=0)
    """Validate after every so many steps; 0 never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batch_size: int = Field(default=256, ge=1)
    """Rows of one validation batch."""
    max_val_samples: int | None = Field(default=None, ge=1)
    """Validate on the first so many records; all by default."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """What the algorithm needs from the runtime; every algorithm implements it.

        Raises:
            NotImplementedError: the section's model does not.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement the property `runtime_needs`: without it the runtime cannot know how many "
            "prompts or records a step takes. See docs/custom_losses_and_algorithms.md"
        )

    @model_validator(mode="after")
    def _declares_its_needs(self) -> AlgorithmConfig:
        # Evaluated here so that an algorithm without a declaration, or with an impossible one, never starts a worker.
        _ = self.runtime_needs
        return self

    @property
    def needs_generation(self) -> bool:
        """Whether it trains on rollouts: the config must then have `policy.generation`."""
        return self.runtime_needs.rollouts is not None

    @property
    def needs_rewards(self) -> bool:
        """Whether its rollouts must be scored: the config must then have a section `env`."""
        rollouts = self.runtime_needs.rollouts
        return rollouts is None or rollouts.rewarded

    @property
    def needs_preferences(self) -> bool:
        """Whether its records are pairs of a chosen and a rejected answer."""
        records = self.runtime_needs.records
        return records is not None and records.pairs

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """What of the run's other sections the algorithm cannot work with: each key that is to blame, and why."""
        yield from ()

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        """How it trains the model of a section (`policy`, `value`), for schedules that count optimizer steps.

        None, the default, leaves that open: a schedule must then say its own length.
        """
        return None
