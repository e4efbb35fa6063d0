"""The settings of `best_of_n`. `rlcore validate` imports this file, so it must not import torch."""

from pydantic import Field

from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig


class BestOfNConfig(AlgorithmConfig):
    default_loss = "nll"  # the loss if `loss_fn` names none

    num_prompts_per_step: int = Field(default=32, ge=1)
    """P, the number of prompts per step."""
    num_generations_per_prompt: int = Field(default=8, ge=2)
    """N, the number of samples per prompt, of which the best is kept."""
    min_reward: float = 0.0
    """A group is dropped if its best reward is not above this value."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """The run has an engine, prompts and environments, and this many rollouts per step."""
        return RuntimeNeeds(
            rollouts=RolloutNeeds(
                prompts_per_draw=self.num_prompts_per_step, samples_per_prompt=self.num_generations_per_prompt
            )
        )
