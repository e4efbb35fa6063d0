"""The base class of environments whose rollouts are games of another library, and the dataset of their seeds."""

from __future__ import annotations

import logging
import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import StepResult, environment_return, final_text
from rl_core.errors import DataError, format_value
from rl_core.interfaces.environment import SESSION_KEY, Conversation, EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.records import Observation, Record
from rl_envs.generated_dataset import GeneratedDataset, is_reserved
from rl_envs.text_games.config import GameConfig, TextGameDatasetConfig

_log = logging.getLogger("rlcore.text_games")


@dataclass(frozen=True)
class Move:
    """How a game responded to one message of the model."""

    observation: Observation
    """What the model reads next."""
    rewards: Mapping[str, float]
    """Named rewards of this message; `game` is the reward of the game itself."""
    has_ended: bool
    answer: str | None = None
    """The action that the message named."""


class TextGame(Protocol):
    """One game. An exception of `play` fails only its rollout."""

    opening: Observation | None
    """What the model reads before its first message."""

    def play(self, message: str) -> Move:
        """Respond to a message of the model, without its thoughts."""
        ...

    def close(self) -> None:
        """Release what the game holds."""
        ...


class TextGameEnvironment(EnvironmentInterface):
    """Plays one game per rollout. A subclass only says how a game of its library begins.

    Rewards are those of the game, turn by turn. If the library raises an exception, only the rollout fails in which it did.
    Metadata: `moves` and `total_reward` so far. Metrics: `accuracy`, the fraction of games whose total reward reached
    `win_reward`, and `mean_moves`.

    Args:
        config: A section of the class `config_class`, or a dict of its keys.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """

    config_class: ClassVar[type[GameConfig]]
    """The model of the section in `env`."""

    def __init__(self, config: GameConfig | Mapping[str, Any]) -> None:
        self.config = read_section(self.config_class, config)
        self._games: dict[str, TextGame] = {}

    @abstractmethod
    def start(self, info: Mapping[str, Any]) -> TextGame:
        """Begin a game.

        Args:
            info: The metadata of the row.

        Raises:
            DataError: The metadata lack something that the game needs.
        """

    def reset(self, metadata: dict[str, Any]) -> Observation | None:
        """Begin the game of a session."""
        game = self._games[metadata[SESSION_KEY]] = self.start(metadata)
        return game.opening

    def step(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Play one message in each of B games."""
        rows = zip(message_log_batch, metadata, strict=True)
        return environment_return([self._turn(str(log[-1]["content"]), info) for log, info in rows])

    def close(self, session: str) -> None:
        """End the game of a session."""
        if game := self._games.pop(session, None):
            game.close()

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of games won; `mean_moves`."""
        states = batch["extra_env_info"]
        won = sum(state.get("total_reward", 0.0) >= self.config.win_reward for state in states)
        moves = sum(state.get("moves", 0) for state in states)
        return batch, {"accuracy": won / len(states), "mean_moves": moves / len(states)}

    def _turn(self, message: str, info: dict[str, Any]) -> StepResult:
        try:
            move = self._games[info[SESSION_KEY]].play(final_text(message))
        except Exception as error:  # of the library, perhaps because of what the model wrote
            _log.warning("%s failed in a game of %s.", type(self).__name__, self.config.game, exc_info=error)
            return StepResult(
                observation=[],
                metadata=info,
                rewards={"game": 0.0},
                terminated=True,
                failure=f"the game {self.config.game} raised {type(error).__name__}: {error}",
            )
        moves = info.get("moves", 0) + 1
        total = info.get("total_reward", 0.0) + move.rewards["game"]
        return StepResult(
            observation=move.observation,
            metadata={**info, "moves": moves, "total_reward": total},
            rewards=move.rewards,
            terminated=move.has_ended or moves >= self.config.max_moves,
            answer=move.answer,
        )


def read_seed(info: Mapping[str, Any], game: str) -> int:
    """The seed of a row, from which all its rollouts begin with the same game.

    Raises:
        DataError: The metadata have no whole number `seed`.
    """
    seed = info.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(
            f"The metadata of `{game}` need `seed`, a whole number of at least 0, found {format_value(seed)}. Use the dataset "
            "`text_game`, or name a column of your data in `env_keys`."
        )
    return seed


_SEEDS = 2**31


class TextGameDataset(GeneratedDataset):
    """Opening messages, each with a `seed` in `extra_env_info`, from which all rollouts of the record begin.

    Record i is a pure function of the settings and i.

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
