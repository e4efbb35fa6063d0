"""Seeds of text games. Record i is a pure function of the settings and i."""

from __future__ import annotations

import random

from rl_core.interfaces.dataset import Record
from rl_envs.generated_dataset import GeneratedDataset, is_reserved
from rl_envs.text_games.config import TextGameDatasetConfig

_SEEDS = 2**31


class TextGameDataset(GeneratedDataset):
    """Opening messages, each with a `seed` in `extra_env_info`, from which all rollouts of the record begin.

    Args:
        config: `TextGameDatasetConfig`, or a dict of its keys.

    Raises:
        ConfigError: A setting is unknown or not allowed.
    """

    config_class = TextGameDatasetConfig
    config: TextGameDatasetConfig

    def generate(self, index: int) -> Record:
        draw = random.Random(f"{self.config.seed}/{index}")
        seed = draw.randrange(_SEEDS)
        while is_reserved(str(seed)) != (self.config.split == "validation"):
            seed = draw.randrange(_SEEDS)
        return {
            "messages": [{"role": "user", "content": self.config.question}],
            "extra_env_info": {"seed": seed},
            "task_name": self.config.task_name or "default",
        }
