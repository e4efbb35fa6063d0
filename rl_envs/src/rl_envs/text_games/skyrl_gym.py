"""The environment `skyrl_gym`: text environments of SkyRL Gym."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym
from skyrl_gym.envs.registration import registry

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.records import Observation
from rl_envs.text_games.config import SkyRLGymConfig
from rl_envs.text_games.session import Move, TextGame, TextGameEnvironment


class SkyRLGymEnvironment(TextGameEnvironment):
    """Runs a text environment of SkyRL Gym.

    Its `extras` are the row's metadata: name the columns that it reads, such as `reward_spec`, in `env_keys` of the dataset.

    Args:
        config: `SkyRLGymConfig`, or a dict of its keys.

    Raises:
        ConfigError: The environment is unknown.
    """

    config_class = SkyRLGymConfig
    config: SkyRLGymConfig

    def __init__(self, config: SkyRLGymConfig | Mapping[str, Any]) -> None:
        super().__init__(config)
        if self.config.id not in registry:
            raise ConfigError(
                f"env.skyrl_gym.id: SkyRL Gym has no environment {self.config.id!r}. It has {', '.join(sorted(registry))}."
            )

    def start(self, info: Mapping[str, Any]) -> TextGame:
        try:
            game = skyrl_gym.make(self.config.id, env_config=self.config.env_config, extras=dict(info), **self.config.kwargs)
        except (AssertionError, KeyError) as error:
            raise DataError(
                f"The metadata of a row lack something that {self.config.id} needs: {error}. Name its columns in `env_keys`."
            ) from error
        return _Game(game)


class _Game:
    def __init__(self, game: Any) -> None:
        self._game = game
        messages, _ = game.init([])
        self.opening: Observation | None = messages or None

    def play(self, message: str) -> Move:
        result = self._game.step(message)
        return Move(result["observations"], {"game": float(result["reward"])}, has_ended=result["done"], answer=message or None)

    def close(self) -> None:
        self._game.close()
