"""Boards of the sliding puzzle: rows of tiles, with 0 for the gap. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence

Board = list[list[int]]
GAP = 0
DIRECTIONS = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Where the tile is, seen from the gap, that moves in this direction into it: (rows, columns)."""


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
