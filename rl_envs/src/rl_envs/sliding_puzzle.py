"""The environment `sliding_puzzle`, a multi-turn game whose board is in the metadata of each row, and its dataset.

A board is a list of rows of tiles, with 0 for the gap.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import StepResult, environment_return, final_text
from rl_core.errors import ConfigError, DataError, format_value
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_core.interfaces.records import Record
from rl_envs.config import SlidingPuzzleDatasetConfig, SlidingPuzzleEnvironmentConfig
from rl_envs.generated_dataset import MAX_DRAWS, GeneratedDataset, is_reserved

_MOVE = re.compile(r"<move>\s*(\w+)\s*</move>", re.IGNORECASE)
Board = list[list[int]]
GAP = 0
DIRECTIONS = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Where the tile is, seen from the gap, that moves in this direction into it: (rows, columns)."""
QUESTION = (
    "Put the tiles of this board in order: 1 to {last} row by row, then the gap (_). In each turn, name one tile next to "
    "the gap to move it into the gap, or the direction in which a tile moves into it (up, down, left or right), as "
    "<move>{example}</move>.\n\n{board}"
)


class SlidingPuzzleEnvironment(EnvironmentInterface):
    """The model moves tiles until the board is in order or it has made `max_moves` moves.

    The last `<move>` of a message names the tile or the direction; a message of one word needs no tag. The rewards are
    `solved`, 1.0 for the move that solves the board, and `illegal_moves`, minus the penalty for a message that is not a legal
    move. A row's metadata contains `board`, and the numbers of `moves` and `illegal_moves` so far.

    Args:
        config: `SlidingPuzzleEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: SlidingPuzzleEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(SlidingPuzzleEnvironmentConfig, config)

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Make B moves; `answers` has each move, or None if it is not legal.

        Raises:
            DataError: the metadata of a row has no `board`, or one that is solved or cannot be solved.
        """
        rows = enumerate(zip(message_log_batch, metadata, strict=True))
        return environment_return([self._turn(row, str(log[-1]["content"]), info) for row, (log, info) in rows])

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of boards solved; `mean_moves` and `mean_illegal_moves` per game."""
        states = batch["extra_env_info"]
        return batch, {
            "accuracy": sum(state["board"] == solved(len(state["board"])) for state in states) / len(states),
            "mean_moves": sum(state["moves"] for state in states) / len(states),
            "mean_illegal_moves": sum(state["illegal_moves"] for state in states) / len(states),
        }

    def _turn(self, row: int, message: str, info: Any) -> StepResult:
        before = _board(row, info)
        move = _read_move(final_text(message), before)
        board = before if move is None else moved(before, move)
        is_solved, moves, is_illegal = board == solved(len(board)), info.get("moves", 0) + 1, move is None
        return StepResult(
            observation={"role": "environment", "content": _reply(move, before, board)},
            metadata={
                **info,
                "board": board,
                "moves": moves,
                "illegal_moves": info.get("illegal_moves", 0) + is_illegal,
            },
            rewards={
                "solved": float(is_solved),
                "illegal_moves": 0.0 - self.config.illegal_move_penalty if is_illegal else 0.0,
            },
            terminated=is_solved or moves >= self.config.max_moves,
            answer=move,
        )


def _read_move(message: str, board: Board) -> str | None:
    """The direction that a message names or whose tile it names; None if that is not legal."""
    tagged = _MOVE.findall(message)
    named = (tagged[-1] if tagged else message.strip()).casefold()
    legal = legal_moves(board)
    return named if named in legal else next((way for way, tile in legal.items() if str(tile) == named), None)


def _reply(move: str | None, before: Board, after: Board) -> str:
    if move is None:
        legal = ", ".join(f"{tile} ({way})" for way, tile in sorted(legal_moves(before).items(), key=lambda each: each[1]))
        return f"That is not a legal move. Legal moves: {legal}.\n\n{format_board(after)}"
    return format_board(after)


def _board(row: int, info: Any) -> Board:
    board = info.get("board") if isinstance(info, Mapping) else None
    try:
        numbers = sorted(tile for row in board for tile in row)  # type: ignore[union-attr]
        assert numbers == list(range(len(board) ** 2))  # type: ignore[arg-type]
        assert all(len(row) == len(board) for row in board)  # type: ignore[union-attr,arg-type]
    except (TypeError, AssertionError):
        raise DataError(
            f"Row {row}: the metadata of `sliding_puzzle` needs `board`, n rows of n numbers from 0 (the gap), found "
            f"{format_value(info)}."
        ) from None
    rows = [list(row) for row in board]  # type: ignore[union-attr]
    if rows == solved(len(rows)) or not can_be_solved(rows):
        what = "is already in order" if rows == solved(len(rows)) else "cannot be put in order by any moves"
        raise DataError(f"Row {row}: the board {rows} {what}. Shuffle the solved board by legal moves to get a valid one.")
    return rows


class SlidingPuzzleDataset(GeneratedDataset):
    """Opening messages, each with its `board` in `extra_env_info`. Record i is a pure function of the settings and i.

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
            "task_name": config.task_name or "sliding_puzzle",
        }

    def _board(self, draw: random.Random) -> Board:
        config = self.config
        for _ in range(MAX_DRAWS):
            board = shuffled(config.size, draw.randint(config.min_shuffles, config.max_shuffles), draw)
            if config.split is None or is_held_out(board) == (config.split == "validation"):
                return board
        raise ConfigError(f"The {config.split} split has no board with {config.max_shuffles} shuffles. Increase max_shuffles.")


def solved(size: int) -> Board:
    """The board in order: 1 to n² - 1 row by row, then the gap."""
    numbers = [*range(1, size * size), GAP]
    return [numbers[row * size : (row + 1) * size] for row in range(size)]


def legal_moves(board: Sequence[Sequence[int]]) -> dict[str, int]:
    """The tile that each legal direction moves."""
    size = len(board)
    row, column = _gap(board)
    moves = {}
    for direction, (down, right) in DIRECTIONS.items():
        if 0 <= row + down < size and 0 <= column + right < size:
            moves[direction] = board[row + down][column + right]
    return moves


def moved(board: Sequence[Sequence[int]], direction: str) -> Board:
    """The board after a legal move."""
    rows = [list(row) for row in board]
    row, column = _gap(board)
    down, right = DIRECTIONS[direction]
    rows[row][column], rows[row + down][column + right] = rows[row + down][column + right], GAP
    return rows


def shuffled(size: int, moves: int, draw: random.Random) -> Board:
    """A board that is not solved, `moves` random moves from the solved one; no move undoes the one before it.

    One more move is made if they lead back to the solved board.
    """
    board, last = solved(size), None
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
    done = 0
    while done < moves or board == solved(size):
        last = draw.choice([each for each in legal_moves(board) if last is None or each != opposite[last]])
        board = moved(board, last)
        done += 1
    return board


def can_be_solved(board: Sequence[Sequence[int]]) -> bool:
    """Whether some sequence of legal moves leads to the solved board: half of all boards are like that.

    A move swaps the gap with a tile and moves the gap by one row or column, so the parity of the permutation and that of the
    gap's distance from its corner change together.
    """
    size = len(board)
    tiles = [tile or size * size for row in board for tile in row]
    inversions = sum(left > right for i, left in enumerate(tiles) for right in tiles[i + 1 :])
    row, column = _gap(board)
    return (inversions + row + column) % 2 == 0


def format_board(board: Sequence[Sequence[int]]) -> str:
    """The board as text: one line per row, `_` for the gap."""
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join(("_" if tile == GAP else str(tile)).rjust(width) for tile in row) for row in board)


def _gap(board: Sequence[Sequence[int]]) -> tuple[int, int]:
    return next((r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if tile == GAP)


def is_held_out(board: Board) -> bool:
    """Whether a board belongs to validation, whatever the seed and the number of shuffles."""
    return is_reserved(repr(board))
