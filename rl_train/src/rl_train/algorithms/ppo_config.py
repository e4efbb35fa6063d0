"""The section `ppo`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field, model_validator

from rl_core.config.schema import Section
from rl_core.config.source_tree import KeyPath
from rl_core.errors import ConfigError
from rl_train.algorithms.losses.config import ClippedPGLossConfig
from rl_train.algorithms.losses.value_config import MseValueLossConfig
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig
from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.runtime_needs import RuntimeNeeds
from rl_train.config.schema import RunConfig

VALUE_LOSS = "mse_value"


class GAEConfig(Section):
    """How advantages and returns are computed from rewards and values (`ppo.gae`)."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount factor from one sampled token to the next."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's lambda for advantages, which trades bias for variance: 1 uses the whole return (no bias), 0 a single token (lowest
    variance)."""
    value_lam: float | None = Field(default=None, ge=0.0, le=1.0)
    """GAE's lambda for the returns that the critic is trained on; defaults to the lambda of the advantages."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0.0)
    """Replaces `lam` with 1 - 1 / (alpha n) for an answer of n tokens (0.05 in VAPO)."""
    normalize_advantages: bool = True
    """Whether to normalize the advantages of a step's trained tokens to mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """Whether to bootstrap the return of a truncated answer from its last value. By default, the length limit is part of the
    task, and a truncated answer has no further reward."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GAEConfig:
        if self.length_adaptive_alpha is not None and self.lam != GAEConfig.model_fields["lam"].default:
            raise ValueError("lam and length_adaptive_alpha both set the lambda of the advantages: remove one of them")
        return self


class PPOConfig(PolicyGradientConfig):
    """Proximal policy optimization (PPO) with a critic."""

    num_generations_per_prompt: int = Field(default=1, ge=1)
    """G, number of samples per prompt. One is enough, since the critic is the baseline."""
    ppo_epochs: int = Field(default=4, ge=1)
    """Number of passes of policy and critic over the rollouts of a step, each in optimizer steps of `train_global_batch_size`
    rows."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start that train only the critic, so that the policy is not trained with an untrained critic."""
    gae: GAEConfig = Field(default_factory=GAEConfig)
    """How advantages and returns are computed from rewards and values."""
    value_loss: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """Loss of the critic. The loss of the policy is `loss_fn`."""

    @model_validator(mode="after")
    def _fixed_value_loss(self) -> PPOConfig:
        if self.value_loss.name not in (None, VALUE_LOSS):
            raise ValueError(
                f"value_loss.name is {self.value_loss.name!r}, but the loss of the critic is always {VALUE_LOSS}: remove the "
                "name"
            )
        return self

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return replace(super().runtime_needs, companions=("value",))

    def takes_one_step(self, run: RunConfig) -> bool:
        """Whether a step makes one optimizer step of the policy, so that its rollouts are always on-policy."""
        rows = run.policy.train_global_batch_size
        return self.ppo_epochs == 1 and (rows is None or rows >= self.rows_per_step)

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        critic_only = self.critic_warmup_steps if model == "policy" else 0
        return TrainingPlan(steps=max(0, self.max_num_steps - critic_only), rows=self.rows_per_step, passes=self.ppo_epochs)

    def check_warmup(self, steps: int) -> None:
        """Rejects a run of this many steps if it ends before the policy is trained; `max_num_epochs` may make it that short.

        Raises:
            ConfigError: The run is not longer than `critic_warmup_steps`.
        """
        if problem := self._warmup_problem(steps):
            raise ConfigError(f"ppo.critic_warmup_steps: {problem}")

    def _warmup_problem(self, steps: int) -> str | None:
        if self.critic_warmup_steps < steps:
            return None
        return (
            f"the first {self.critic_warmup_steps} steps train only the critic and the run has {steps}, so the policy would "
            "never be trained: lower it, or train longer (max_num_steps, max_num_epochs)."
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts(run)
        if problem := self._warmup_problem(self.max_num_steps):
            yield (run.algorithm_name, "critic_warmup_steps"), problem
        if isinstance(run.loss_fn, ClippedPGLossConfig) and run.loss_fn.disable_ppo_ratio and not self.takes_one_step(run):
            yield (
                ("loss_fn", "disable_ppo_ratio"),
                "without a ratio, a step must make a single optimizer step, since further ones would train on samples of an "
                "older policy. Set ppo.ppo_epochs to 1 and remove policy.train_global_batch_size, or keep the ratio.",
            )
