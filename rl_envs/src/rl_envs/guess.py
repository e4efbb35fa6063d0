"""The environment `guess`, a multi-turn game whose state is in the metadata of each row, and the dataset of its secrets."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import StepResult, environment_return, final_text
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_core.interfaces.records import Record
from rl_envs.config import GuessNumberDatasetConfig, GuessNumberEnvironmentConfig
from rl_envs.generated_dataset import GeneratedDataset

_NUMBER = re.compile(r"-?[0-9]{1,18}")


class GuessNumberEnvironment(EnvironmentInterface):
    """The model guesses a number and the environment replies `higher` or `lower`, until a hit or the last guess.

    The reward is 1.0 for a hit and 0.0 for every other turn. A row's metadata contains `secret`, the number of
    `guesses`, and whether the game is `won`.

    Args:
        config: `GuessNumberEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: GuessNumberEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(GuessNumberEnvironmentConfig, config)

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Reply to B guesses, the last messages of their conversations.

        Returns:
            Rewards and ends [B] float32; `answers` has each guess, or None if the message is not a whole number.

        Raises:
            DataError: A row's metadata has no `secret`.
        """
        rows = zip(message_log_batch, metadata, strict=True)
        return environment_return([self._turn(log[-1]["content"], info) for log, info in rows])

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of games won; `mean_guesses`."""
        states = batch["extra_env_info"]
        return batch, {
            "accuracy": sum(state["won"] for state in states) / len(states),
            "mean_guesses": sum(state["guesses"] for state in states) / len(states),
        }

    def _turn(self, message: str, info: Any) -> StepResult:
        secret, guess = _secret(info), _read_guess(message)
        is_hit, count = guess == secret, info.get("guesses", 0) + 1
        return StepResult(
            observation={"role": "environment", "content": self._reply(guess, secret)},
            metadata={**info, "guesses": count, "won": is_hit},
            rewards={"reward": float(is_hit)},
            terminated=is_hit or count >= self.config.max_guesses,
            answer=None if guess is None else str(guess),
        )

    def _reply(self, guess: int | None, secret: int) -> str:
        if guess is None:
            return self.config.unreadable
        if guess == secret:
            return "correct"
        return self.config.higher if guess < secret else self.config.lower


def _read_guess(message: str) -> int | None:
    number = _NUMBER.fullmatch(final_text(message).strip())
    return None if number is None else int(number.group())


def _secret(info: Any) -> int:
    if not isinstance(info, Mapping) or not isinstance(info.get("secret"), int):
        raise DataError(
            f"A row's metadata has no whole number `secret`: found {info!r}. Records of the dataset `guess` have it."
        )
    return int(info["secret"])


class GuessNumberDataset(GeneratedDataset):
    """Opening messages, each with a secret number in its `extra_env_info`. Record i is a pure function of the seed and i.

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
            "task_name": config.task_name or "guess",
        }
