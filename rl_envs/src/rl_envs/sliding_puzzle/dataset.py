"""Boards to solve. Record i is a pure function of the settings and i."""

from __future__ import annotations

import random

from rl_core.errors import ConfigError
from rl_core.interfaces.dataset import Record
from rl_envs.generated_dataset import MAX_DRAWS, GeneratedDataset, is_reserved
from rl_envs.sliding_puzzle.board import Board, format_board, shuffled
from rl_envs.sliding_puzzle.config import SlidingPuzzleDatasetConfig

TASK = "sliding_puzzle"
QUESTION = (
    "Put the tiles of this board in order: 1 to {last} row by row, then the gap (_). In each turn, name one tile next to "
    "the gap to move it into the gap, or the direction in which a tile moves into it (up, down, left or right), as "
    "<move>{example}</move>.\n\n{board}"
)


class SlidingPuzzleDataset(GeneratedDataset):
    """Opening messages, each with its `board` in `extra_env_info`.

    Args:
        config: `SlidingPuzzleDatasetConfig`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """

    config_class = SlidingPuzzleDatasetConfig
    config: SlidingPuzzleDatasetConfig

    def generate(self, index: int) -> Record:
        config = self.config
        draw = random.Random(f"{config.seed}/{index}")
        board = self._board(draw)
        question = QUESTION.format(last=config.size**2 - 1, example=config.size, board=format_board(board))
        return {
            "messages": [{"role": "user", "content": question}],
            "extra_env_info": {"board": board, "moves": 0, "illegal_moves": 0},
            "task_name": config.task_name or TASK,
        }

    def _board(self, draw: random.Random) -> Board:
        config = self.config
        for _ in range(MAX_DRAWS):
            board = shuffled(config.size, draw.randint(config.min_shuffles, config.max_shuffles), draw)
            if config.split is None or is_held_out(board) == (config.split == "validation"):
                return board
        raise ConfigError(f"The {config.split} split has no board with {config.max_shuffles} shuffles. Increase max_shuffles.")


def is_held_out(board: Board) -> bool:
    """Whether a board belongs to validation, whatever the seed and the number of shuffles."""
    return is_reserved(repr(board))
