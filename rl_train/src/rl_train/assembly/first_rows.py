"""Tokenizes the first rows of a run before it starts, so that unusable rows are not found hours later."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rl_train.data.bad_rows import BadRow, BadRowError, BadRowsError
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.records import SKIP_BAD_ROWS

_log = logging.getLogger("rlcore")


def read_rows(rows: Sequence[Any], numbers: Iterable[int]) -> tuple[list[int], int, list[BadRow]]:
    """The numbers of the rows that can be tokenized, how many of them are dropped as too long, and the other rows."""
    good: list[int] = []
    bad: list[BadRow] = []
    dropped = 0
    for number in numbers:
        try:
            dropped += not rows[number]["loss_multiplier"]
            good.append(number)
        except BadRowError as error:
            bad.append(error.row)
    return good, dropped, bad


def check_rows(loader: BatchedDataLoader, name: str, *, most: int) -> None:
    """Tokenize the next rows of a loader, without drawing them.

    Args:
        loader: its rows are tokenized on access.
        name: name of the data in messages.
        most: largest number of rows to check; tokenizing takes milliseconds per row, too long for large datasets.

    Raises:
        DataError: a row is too long, cannot be rendered or has nothing to train on. The message lists all such rows.
    """
    numbers = loader.next_rows(most)
    _, dropped, bad = read_rows(loader.dataset, numbers)
    if bad:
        raise BadRowsError(bad, total=len(numbers), rows_of=f"{len(numbers)} checked rows of {name}", remedy=SKIP_BAD_ROWS)
    if dropped:
        _log.warning("%d of %d checked rows of %s are too long and dropped", dropped, len(numbers), name)
    if len(numbers) < len(loader.dataset) and numbers:
        _log.info(
            "checked %d of %d rows of %s; the others are checked when they are used (data.check_rows)",
            len(numbers),
            len(loader.dataset),
            name,
        )
