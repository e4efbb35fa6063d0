"""The section `sft`. Does not import torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.runtime_needs import RecordNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig, RunConfig


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning (SFT)."""

    default_loss: ClassVar[str] = "nll"

    records_key: ClassVar[str | None] = "global_batch_size"

    global_batch_size: int = Field(default=128, ge=1)
    """Number of rows per step; the last step of an epoch may have fewer. `policy.train_global_batch_size` splits them into
    optimizer steps."""
    only_unmask_final: bool = False
    """Whether to train only on the last assistant message instead of all of them."""
    val_accuracy: bool = False
    """Whether validation also completes the prompts greedily and scores the answers. Requires `policy.generation` and `env`."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in a validation rollout; null means as many as the environment needs."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            records=RecordNeeds(records_per_step=self.global_batch_size, only_final_answer=self.only_unmask_final),
            samples_in_validation=self.val_accuracy,
            max_turns=self.max_rollout_turns,
        )

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.global_batch_size)
