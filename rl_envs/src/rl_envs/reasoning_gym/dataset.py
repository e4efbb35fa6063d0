"""Problems of a Reasoning Gym task as records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rl_core.interfaces.dataset import Record
from rl_envs.generated_dataset import GeneratedDataset
from rl_envs.reasoning_gym.config import ReasoningGymDatasetConfig
from rl_envs.reasoning_gym.tasks import make_task

TASK = "reasoning_gym"


class ReasoningGymDataset(GeneratedDataset):
    """Questions of one task. `extra_env_info` has what its scorer needs: `task`, `params` and the `entry`.

    Args:
        config: `ReasoningGymDatasetConfig`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: the package is not installed, or the task or one of its settings does not exist.
    """

    config_class = ReasoningGymDatasetConfig
    config: ReasoningGymDatasetConfig

    def __init__(self, config: ReasoningGymDatasetConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._task = make_task(
            self.config.task, self.config.params, seed=_generator_seed(self.config.seed), size=self.config.num_samples
        )

    def generate(self, index: int) -> Record:
        config, entry = self.config, self._task[index]
        system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        return {
            "messages": [*system, {"role": "user", "content": entry["question"].strip()}],
            "extra_env_info": {
                "task": config.task,
                "params": config.params,
                "entry": entry,
                "expected_answer": None if entry["answer"] is None else str(entry["answer"]),
            },
            "task_name": config.task_name or TASK,
        }


def _generator_seed(seed: int) -> int:
    """The seed of the task's generator, 31 bits.

    Reasoning Gym generates problem i from `seed + i`. Problem i of seed 1 would be problem i + 1 of seed 0, so that validation
    data of another seed would be training data. Hashed seeds are far apart.
    """
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest()) >> 1
