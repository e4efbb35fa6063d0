"""The environment `guess`: a multi-turn game whose state is in the metadata of each row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.completions import final_text
from rl_envs.config import GuessNumberEnvironmentConfig, read_section

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
        guesses = [_read_guess(log[-1]["content"]) for log in message_log_batch]
        secrets = [_secret(info) for info in metadata]
        counts = [info.get("guesses", 0) + 1 for info in metadata]
        hits = [guess == secret for guess, secret in zip(guesses, secrets, strict=True)]
        ends = [hit or count >= self.config.max_guesses for hit, count in zip(hits, counts, strict=True)]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": self._reply(guess, secret)}
                for guess, secret in zip(guesses, secrets, strict=True)
            ],
            metadata=[{**info, "guesses": count, "won": hit} for info, count, hit in zip(metadata, counts, hits, strict=True)],
            next_stop_strings=[None] * len(guesses),
            rewards=torch.tensor(hits, dtype=torch.float32),
            terminateds=torch.tensor(ends, dtype=torch.float32),
            answers=[None if guess is None else str(guess) for guess in guesses],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of games won; `mean_guesses`."""
        states = batch["extra_env_info"]
        return batch, {
            "accuracy": sum(state["won"] for state in states) / len(states),
            "mean_guesses": sum(state["guesses"] for state in states) / len(states),
        }

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
