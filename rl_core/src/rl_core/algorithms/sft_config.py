"""The section `sft`; imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_core.config.optimizer_steps import TrainingPlan
from rl_core.config.runtime_needs import RecordNeeds, RuntimeNeeds
from rl_core.config.schema import AlgorithmConfig, RunConfig


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning."""

    default_loss: ClassVar[str] = "nll"

    global_batch_size: int = Field(default=128, ge=1)
    """Rows of one step; `policy.train_global_batch_size` splits them into optimizer steps."""
    only_unmask_final: bool = False
    """Train on the last assistant message alone; on all of them otherwise."""
    val_accuracy: bool = False
    """Also complete the validation prompts greedily and score them; needs `policy.generation` and `env`."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Most turns of one validation rollout; null means as many as the environment needs."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            records=RecordNeeds(records_per_step=self.global_batch_size, only_final_answer=self.only_unmask_final),
            samples_in_validation=self.val_accuracy,
            max_turns=self.max_rollout_turns,
        )

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.global_batch_size)
