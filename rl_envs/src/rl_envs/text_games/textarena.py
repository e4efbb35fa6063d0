"""The environment `textarena`: games of TextArena for one player."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.core import ObservationType

from rl_core.errors import ConfigError
from rl_core.interfaces.records import Message, Observation
from rl_envs.text_games.config import TextArenaConfig
from rl_envs.text_games.session import Move, TextGame, TextGameEnvironment, read_seed

_PLAYER = 0
_DOWNLOAD = re.compile(r"nltk\.download\('([^']+)'\)")
_RANDOM = threading.Lock()


class TextArenaEnvironment(TextGameEnvironment):
    """Plays a TextArena game for one player.

    A row's metadata contain `seed`, with which the game begins. The reward is the one that the game gives at its end; a game
    that has not ended after `max_moves` messages gets 0.0.

    Args:
        config: `TextArenaConfig`, or a dict of its keys.

    Raises:
        ConfigError: The game cannot be started: it is unknown, needs several players, or data that is not on this machine.
    """

    config_class = TextArenaConfig
    config: TextArenaConfig

    def __init__(self, config: TextArenaConfig | Mapping[str, Any]) -> None:
        super().__init__(config)
        try:
            _Game(self.config, seed=0)
        except Exception as error:  # of the library: games raise many kinds
            raise ConfigError(f"env.textarena.id: {self.config.id} {_why_it_cannot_start(error)}") from error

    def start(self, info: Mapping[str, Any]) -> TextGame:
        return _Game(self.config, read_seed(info, "textarena"))


class _Game:
    def __init__(self, config: TextArenaConfig, seed: int) -> None:
        self._actor = textarena.make(config.id, **config.kwargs)
        # Wrappers of observations repeat the whole conversation in each turn; those of actions are kept.
        self._game = self._actor
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env
        self._random_state = random.Random(seed).getstate()
        with self._own_random():
            self._actor.reset(num_players=1, seed=seed)
        self.opening: Observation | None = self._observation()

    def play(self, message: str) -> Move:
        with self._own_random():
            has_ended, _ = self._actor.step(action=message)
        rewards = self._game.close()[0] if has_ended else None
        reward = float((rewards or {}).get(_PLAYER, 0.0))
        return Move(self._observation(), {"game": reward}, has_ended=has_ended, answer=message.strip() or None)

    def close(self) -> None:
        """TextArena's games hold nothing."""

    def _observation(self) -> Message:
        _, messages = self._game.get_observation()
        texts = [text for _, text, kind in messages if kind is not ObservationType.PLAYER_ACTION]
        return {"role": "environment", "content": "\n\n".join(text.strip() for text in texts)}

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Games draw from Python's global generator, so its state is kept per game: other games do not change this one."""
        with _RANDOM:
            outside = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outside)


def _why_it_cannot_start(error: Exception) -> str:
    data = _DOWNLOAD.search(str(error)) if isinstance(error, LookupError) else None
    if data is not None:
        return (
            f"needs the NLTK data {data[1]!r}, which is not on this machine. Download it once: "
            f"python -m nltk.downloader {data[1]}"
        )
    return f"cannot be started for one player with these kwargs: {type(error).__name__}: {error}"
