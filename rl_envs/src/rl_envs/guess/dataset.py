"""Secret numbers to guess. Record i is a pure function of the seed and i."""

from __future__ import annotations

import random

from rl_core.interfaces.dataset import Record
from rl_envs.config import GuessNumberDatasetConfig
from rl_envs.generated_dataset import GeneratedDataset

TASK = "guess"


class GuessNumberDataset(GeneratedDataset):
    """Opening messages, each with a secret number in its `extra_env_info`.

    Args:
        config: `GuessNumberDatasetConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = GuessNumberDatasetConfig
    config: GuessNumberDatasetConfig

    def generate(self, index: int) -> Record:
        config = self.config
        draw = random.Random(f"{config.seed}/{index}")
        question = config.question.replace("{lowest}", str(config.lowest)).replace("{highest}", str(config.highest))
        return {
            "messages": [{"role": "user", "content": question}],
            "extra_env_info": {"secret": draw.randint(config.lowest, config.highest), "guesses": 0},
            "task_name": config.task_name or TASK,
        }
