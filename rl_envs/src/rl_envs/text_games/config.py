"""Sections of the adapters of text games, and of the dataset that seeds them. Lightweight imports only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_core.config.schema import EnvironmentConfig
from rl_envs.config import GeneratedDatasetConfig


class GameConfig(EnvironmentConfig):
    """Settings that all adapters of text games share."""

    max_moves: int = Field(default=20, ge=1)
    """Maximum number of messages of the model before the game ends. Each takes one turn."""
    win_reward: float = 1.0
    """Total reward of a game from which it counts as won in `accuracy`."""

    @property
    def turns_needed(self) -> int:
        return self.max_moves

    @property
    def game(self) -> str:
        """What is played, for errors."""
        raise NotImplementedError


class TextGameConfig(GameConfig):
    """Settings of the adapters of libraries."""

    id: str = Field(min_length=1)
    """Name of the game in its library."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments with which the library makes the game."""

    @property
    def game(self) -> str:
        return self.id


class GymnasiumConfig(TextGameConfig):
    """`env.gymnasium`: a Gymnasium environment that is played in text."""

    observation: Literal["render", "value"] = "render"
    """What the model reads: the game drawn as text (render mode `ansi`), or the value of the observation."""
    actions: dict[str, Any] | None = None
    """The actions by the words that name them, such as `{left: 0, right: 2}`. Null: the numbers of a discrete action space."""
    action_tag: str | None = "action"
    """The last `<action>` of a message names the action; a message without one is read whole. Null: always read whole."""
    illegal_action_penalty: float = Field(default=0.0, ge=0.0)
    """Penalty subtracted from the reward for every message that names no action. Such a message does not change the game."""


class TextArenaConfig(TextGameConfig):
    """`env.textarena`: a TextArena game for one player."""


class SkyRLGymConfig(TextGameConfig):
    """`env.skyrl_gym`: a text environment of SkyRL Gym."""

    env_config: dict[str, Any] = Field(default_factory=dict)
    """The settings of the environment, its argument `env_config`."""


class OpenEnvConfig(GameConfig):
    """`env.openenv`: an environment of an OpenEnv server."""

    url: str = Field(pattern="^(http|ws)s?://")
    """URL of the server, such as `http://localhost:8000`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the server's `reset`, in addition to the row's seed."""
    action_key: str | None = "message"
    """Field of the action that gets the model's message. Null: the message contains the action as a JSON object."""
    observation_key: str | None = None
    """Field of the observation that the model reads. Null: the whole observation as JSON."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Maximum time that the server may take to reply, in seconds."""

    @property
    def game(self) -> str:
        return self.url


class TextGameDatasetConfig(GeneratedDatasetConfig):
    """One opening message and a seed per record, for the environments `gymnasium` and `textarena`."""

    dataset_name: str = "text_game"
    """Name of a registered dataset, or the dotted path of its class."""
    num_samples: int = Field(default=1024, ge=1)
    """Number of records."""
    seed: int = 0
    """Random seed. The seed of record i depends only on this seed, the split and i."""
    split: Literal["train", "validation"] = "train"
    """Which seeds to draw. One seed in eight is reserved for validation."""
    question: str = Field(min_length=1)
    """First message to the model: the rules of the game and how to name an action. The opening of the game follows it."""
