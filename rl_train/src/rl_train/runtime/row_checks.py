"""Tokenizes the first rows that a run draws before it starts, so that a row that cannot be used is not found hours later."""

from __future__ import annotations

import logging

from rl_core.errors import DataError
from rl_train.data.dataloader import BatchedDataLoader

_log = logging.getLogger("rlcore")
_LISTED = 5


def check_rows(loader: BatchedDataLoader, name: str, *, most: int) -> None:
    """Tokenize the next rows of a loader, without drawing them.

    Args:
        loader: draws from rows that are tokenized when they are read.
        name: what messages call the data.
        most: how many rows are read; tokenizing takes milliseconds per row, so a large dataset is not read whole.

    Raises:
        DataError: a row is too long, cannot be rendered or has nothing to train on. It lists the first such rows.
    """
    numbers = loader.next_rows(most)
    bad: list[str] = []
    dropped = 0
    for number in numbers:
        try:
            dropped += not loader.dataset[number]["loss_multiplier"]
        except DataError as error:
            bad.append(str(error))
    if len(bad) > 1:
        more = "" if len(bad) <= _LISTED else f"\n  and {len(bad) - _LISTED} more"
        found = "".join(f"\n  {reason}" for reason in bad[:_LISTED])
        raise DataError(f"{len(bad)} of the first {len(numbers)} rows that are drawn from {name} cannot be used:{found}{more}")
    if bad:
        raise DataError(bad[0])
    if dropped:
        _log.warning("%d of the first %d rows that are drawn from %s are too long and dropped", dropped, len(numbers), name)
    if len(numbers) < len(loader.dataset) and numbers:
        _log.info(
            "checked the first %d of %d rows of %s; later ones are checked when they are drawn (data.check_rows)",
            len(numbers),
            len(loader.dataset),
            name,
        )
