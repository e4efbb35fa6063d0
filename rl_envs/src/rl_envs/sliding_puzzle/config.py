"""Sections of the environment and the dataset `sliding_puzzle`. Lightweight imports only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_core.config.schema import EnvironmentConfig
from rl_envs.config import GeneratedDatasetConfig


class SlidingPuzzleEnvironmentConfig(EnvironmentConfig):
    """`env.sliding_puzzle`: the model moves one tile per turn until the board is in order."""

    max_moves: int = Field(default=12, ge=1)
    """Maximum number of moves, legal or not, before the game is lost. Each takes one turn."""
    illegal_move_penalty: float = Field(default=0.0, ge=0.0)
    """Penalty subtracted from the reward for every message that is not a legal move."""

    @property
    def turns_needed(self) -> int:
        return self.max_moves


class SlidingPuzzleDatasetConfig(GeneratedDatasetConfig):
    """Shuffled boards, each made from the solved one by legal moves, so that every board can be solved."""

    dataset_name: str = "sliding_puzzle"
    """Name of a registered dataset, or the dotted path of its class."""
    num_samples: int = Field(default=1024, ge=1)
    """Number of records."""
    size: int = Field(default=3, ge=2, le=6)
    """Number of rows and columns of a board."""
    min_shuffles: int = Field(default=1, ge=1)
    """Minimum number of random moves that shuffle a solved board. A board shuffled by n moves can be solved in at most n."""
    max_shuffles: int = Field(default=4, ge=1)
    """Maximum number of random moves. The number is drawn uniformly from the range."""
    split: Literal["train", "validation"] | None = None
    """Which boards to draw. One board in eight is reserved for validation, by a hash of the board. Null: all boards."""
    seed: int = 0
    """Random seed. Record i depends only on the seed, the size, the split, the range of shuffles and i."""

    @model_validator(mode="after")
    def _shuffles_in_order(self) -> SlidingPuzzleDatasetConfig:
        if self.min_shuffles > self.max_shuffles:
            raise ValueError(
                f"min_shuffles ({self.min_shuffles}) is above max_shuffles ({self.max_shuffles}): the range is empty"
            )
        return self
