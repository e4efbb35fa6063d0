"""The section `ppo`; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field, model_validator

from rl_core.algorithms.losses.config import ClippedPGLossConfig
from rl_core.algorithms.losses.value_config import MseValueLossConfig
from rl_core.algorithms.rewarded_config import RewardedConfig
from rl_core.config.optimizer_steps import TrainingPlan
from rl_core.config.runtime_needs import RuntimeNeeds
from rl_core.config.schema import RunConfig, Section
from rl_core.config.written import Path
from rl_core.errors import ConfigError

VALUE_LOSS = "mse_value"


class GAEConfig(Section):
    """How rewards and values become advantages and returns (`ppo.gae`)."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """How much of what happened counts against what the critic expected: 1 all of it (no bias), 0 a single token (no
    variance)."""
    value_lam: float | None = Field(default=None, ge=0.0, le=1.0)
    """The same for the returns that the critic learns; as for the advantages by default."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0.0)
    """In place of `lam`: 1 - 1 / (alpha n) for an answer of n tokens (VAPO has 0.05)."""
    normalize_advantages: bool = True
    """Advantages of a step's trained tokens are given mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """An answer that a limit cut off goes on in the critic's eyes: its last value stands for what would have come. By default
    the limit is part of the task, and nothing comes after it."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GAEConfig:
        if self.length_adaptive_alpha is not None and self.lam != GAEConfig.model_fields["lam"].default:
            raise ValueError("lam and length_adaptive_alpha both say how far advantages look: remove one of them")
        return self


class PPOConfig(RewardedConfig):
    """Proximal policy optimisation with a critic."""

    num_generations_per_prompt: int = Field(default=1, ge=1)
    """G, the samples drawn for each prompt; the critic is the baseline, so one is enough."""
    ppo_epochs: int = Field(default=4, ge=1)
    """Passes of policy and critic over the rollouts of a step, each in optimizer steps of `train_global_batch_size` rows."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """The first so many steps train the critic alone, so that the policy never follows a critic that knows nothing."""
    gae: GAEConfig = Field(default_factory=GAEConfig)
    """How rewards and values become advantages and returns."""
    value_loss: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """What the critic minimises; the policy's loss is `loss_fn`."""

    @model_validator(mode="after")
    def _one_loss_of_values(self) -> PPOConfig:
        if self.value_loss.name not in (None, VALUE_LOSS):
            raise ValueError(
                f"value_loss.name is {self.value_loss.name!r}, and the critic's loss is {VALUE_LOSS}: remove the name"
            )
        return self

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return replace(super().runtime_needs, companions=("value",))

    def takes_one_step(self, run: RunConfig) -> bool:
        """Whether a step's rollouts are one optimizer step of the policy, so that they are always its own."""
        rows = run.policy.train_global_batch_size
        return self.ppo_epochs == 1 and (rows is None or rows >= self.rows_per_step)

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        alone = self.critic_warmup_steps if model == "policy" else 0
        return TrainingPlan(steps=max(0, self.max_num_steps - alone), rows=self.rows_per_step, passes=self.ppo_epochs)

    def refuse_a_warmup_of(self, steps: int) -> None:
        """Refuse a run of so many steps that ends before the policy is trained: `max_num_epochs` may make it that short.

        Raises:
            ConfigError: it does.
        """
        if problem := self._warmup_problem(steps):
            raise ConfigError(f"ppo.critic_warmup_steps: {problem}")

    def _warmup_problem(self, steps: int) -> str | None:
        if self.critic_warmup_steps < steps:
            return None
        return (
            f"{self.critic_warmup_steps} steps for the critic alone leave the policy none of the {steps} that the run has: "
            "lower it, or train longer (max_num_steps, max_num_epochs)."
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        yield from super().conflicts(run)
        if problem := self._warmup_problem(self.max_num_steps):
            yield (run.algorithm_name, "critic_warmup_steps"), problem
        if isinstance(run.loss_fn, ClippedPGLossConfig) and run.loss_fn.disable_ppo_ratio and not self.takes_one_step(run):
            yield (
                ("loss_fn", "disable_ppo_ratio"),
                "without a ratio, all optimizer steps of a step but the first would be taken on samples of another policy. Set "
                "ppo.ppo_epochs to 1 and leave policy.train_global_batch_size out, or keep the ratio.",
            )
