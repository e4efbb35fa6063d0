"""The environment `sliding_puzzle`: a multi-turn game whose board is in the metadata of each row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.config.python_sections import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import StepResult, environment_return, final_text
from rl_core.errors import DataError, format_value
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.sliding_puzzle.board import Board, can_be_solved, format_board, legal_moves, moved, solved
from rl_envs.sliding_puzzle.config import SlidingPuzzleEnvironmentConfig

_MOVE = re.compile(r"<move>\s*(\w+)\s*</move>", re.IGNORECASE)


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
