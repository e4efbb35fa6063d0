"""The settings of `best_of_n`; `rlcore validate` imports this file, so it imports no torch."""

from pydantic import Field

from rl_core.config.runtime_needs import RolloutNeeds, RuntimeNeeds
from rl_core.config.schema import AlgorithmConfig


class BestOfNConfig(AlgorithmConfig):
    default_loss = "nll"  # what `loss_fn` means where it names none

    num_prompts_per_step: int = Field(default=32, ge=1)
    """P, the prompts drawn each step."""
    num_generations_per_prompt: int = Field(default=8, ge=2)
    """N, the samples of which the best is kept."""
    min_reward: float = 0.0
    """A group whose best earns no more is left out."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """Rollouts: the run has an engine, prompts and environments, and draws so many at once."""
        return RuntimeNeeds(
            rollouts=RolloutNeeds(
                prompts_per_draw=self.num_prompts_per_step, samples_per_prompt=self.num_generations_per_prompt
            )
        )
