"""The environment `gymnasium`: a Gymnasium environment whose state is drawn as text and whose actions have names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

from rl_core.errors import ConfigError
from rl_core.interfaces.records import Message, Observation
from rl_envs.completions import read_tagged
from rl_envs.text_games.config import GymnasiumConfig
from rl_envs.text_games.session import Move, TextGame, TextGameEnvironment, read_seed

_RESET = "\x1b[0m"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEnvironment(TextGameEnvironment):
    """Plays a Gymnasium environment by naming its actions.

    A row's metadata contain `seed`, with which the game is reset. Characters that the drawing highlights, such as the position
    of the player, are put in brackets. A message that names no action is answered with the list of actions.

    Args:
        config: `GymnasiumConfig`, or a dict of its keys.

    Raises:
        ConfigError: The game is unknown, cannot be drawn as text, or has actions without names.
    """

    config_class = GymnasiumConfig
    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig | Mapping[str, Any]) -> None:
        super().__init__(config)
        game = _made(self.config)
        self._actions = _named_actions(game, self.config)
        game.close()

    def start(self, info: Mapping[str, Any]) -> TextGame:
        return _Game(self.config, self._actions, read_seed(info, "gymnasium"))


class _Game:
    def __init__(self, config: GymnasiumConfig, actions: Mapping[str, Any], seed: int) -> None:
        self._config, self._actions = config, actions
        self._game = _made(config)
        observation, _ = self._game.reset(seed=seed)
        self.opening: Observation | None = self._shown(observation)

    def play(self, message: str) -> Move:
        text = message if self._config.action_tag is None else read_tagged(message, self._config.action_tag) or message
        name = text.strip().casefold()
        if name not in self._actions:
            reply = f"That is not an action. Actions: {', '.join(self._actions)}."
            penalty = 0.0 - self._config.illegal_action_penalty
            return Move({"role": "environment", "content": reply}, {"game": 0.0, "illegal_action": penalty}, has_ended=False)
        observation, reward, terminated, truncated, _ = self._game.step(self._actions[name])
        rewards = {"game": float(reward), "illegal_action": 0.0}
        return Move(self._shown(observation), rewards, has_ended=terminated or truncated, answer=name)

    def close(self) -> None:
        self._game.close()

    def _shown(self, observation: Any) -> Message:
        text = _in_brackets(str(self._game.render())) if self._config.observation == "render" else str(observation)
        return {"role": "environment", "content": text.strip("\n")}


def _made(config: GymnasiumConfig) -> gymnasium.Env[Any, Any]:
    mode = "ansi" if config.observation == "render" else None
    try:
        modes = gymnasium.spec(config.id).make(**config.kwargs).metadata.get("render_modes", [])
        if mode is not None and mode not in modes:
            raise ConfigError(
                f"env.gymnasium.id: {config.id} cannot be drawn as text (its render modes: {', '.join(modes)}). "
                "Set observation: value.",
            )
        return gymnasium.make(config.id, render_mode=mode, **config.kwargs)
    except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
        raise ConfigError(f"env.gymnasium: {config.id} cannot be made with kwargs {config.kwargs}: {error}") from error


def _named_actions(game: gymnasium.Env[Any, Any], config: GymnasiumConfig) -> dict[str, Any]:
    space = game.action_space
    if config.actions is None:
        if not isinstance(space, Discrete):
            raise ConfigError(f"env.gymnasium.actions: {config.id} has the action space {space}: name its actions.")
        return {str(number): number for number in range(int(space.start), int(space.start + space.n))}
    if outside := [name for name, action in config.actions.items() if not space.contains(action)]:
        raise ConfigError(
            f"env.gymnasium.actions: {outside[0]} is not an action of {config.id}: {config.actions[outside[0]]!r} is not in "
            f"its action space {space}."
        )
    return {name.casefold(): action for name, action in config.actions.items()}


def _in_brackets(drawing: str) -> str:
    """A drawing without escape sequences; what they highlight is in brackets."""
    return _STYLE.sub("[", drawing.replace(_RESET, "]"))
