"""The settings of all algorithms here."""

from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig


class Settings(AlgorithmConfig):
    """Four groups of four samples a step."""

    default_loss = "nll"

    @property
    def runtime_needs(self):
        return RuntimeNeeds(rollouts=RolloutNeeds(prompts_per_draw=4, samples_per_prompt=4))
