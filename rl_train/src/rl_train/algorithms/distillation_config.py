"""The section `distillation`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rl_core.config.source_tree import KeyPath
from rl_train.algorithms.losses.config import ClippedPGLossConfig, NLLLossConfig
from rl_train.algorithms.losses.distillation_config import DistillationLossConfig
from rl_train.algorithms.losses.preference_config import PreferenceLossConfig
from rl_train.algorithms.rollout_algorithm_config import RolloutAlgorithmConfig
from rl_train.config.rules.required_sections import validates
from rl_train.config.runtime_needs import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import RunConfig


class DistillationConfig(RolloutAlgorithmConfig):
    """On-policy distillation: a teacher scores each token of the student's answers."""

    default_loss: ClassVar[str] = "distillation"

    num_prompts_per_step: int = Field(default=64, ge=1)
    """P, number of prompts per step."""
    student_data_fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """GKD's lambda: probability that the rows of a step are sampled from the student. Otherwise they are answers from the
    training data."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            rollouts=RolloutNeeds(
                prompts_per_draw=self.num_prompts_per_step,
                samples_per_prompt=self.num_generations_per_prompt,
                sampled_fraction=self.student_data_fraction,
                rewarded=False,
                accepts_segments=True,
                accepts_stale=True,
            ),
            max_turns=self.max_rollout_turns,
            companions=("teacher",),
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        loss, generation = run.loss_fn, run.policy.generation
        if isinstance(loss, ClippedPGLossConfig | NLLLossConfig | PreferenceLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{loss.name} does not use a teacher, so {run.algorithm_name} cannot use it. Use distillation.",
            )
        if self.student_data_fraction < 1.0 and self.max_num_epochs is not None:
            yield (
                (run.algorithm_name, "max_num_epochs"),
                "if student_data_fraction is below 1, only some steps draw prompts, so an epoch is not a fixed number of "
                "steps. Set only max_num_steps.",
            )
        if generation is None or not isinstance(loss, DistillationLossConfig):
            return
        if self.student_data_fraction < 1.0 and loss.topk is None:
            yield (
                (run.algorithm_name, "student_data_fraction"),
                "if loss_fn.topk is null, the KL to the teacher is estimated from tokens sampled from the student, which "
                "answers from the data are not. Set student_data_fraction to 1, or set loss_fn.topk.",
            )
        if validates(run) and loss.topk is None and generation.val_temperature == 0.0:
            yield (
                ("policy", "generation", "val_temperature"),
                "validation is greedy, but if loss_fn.topk is null, the KL to the teacher is estimated from tokens sampled "
                "from the student's distribution. Set val_temperature to the training temperature "
                f"({generation.temperature:g}), or set loss_fn.topk.",
            )
