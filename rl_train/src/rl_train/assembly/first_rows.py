"""Tokenizes the first rows of a run before it starts, so that unusable rows are not found hours later."""

from __future__ import annotations

import logging

from rl_core.errors import DataError
from rl_train.data.dataloader import BatchedDataLoader

_log = logging.getLogger("rlcore")
_LISTED = 5


def check_rows(loader: BatchedDataLoader, name: str, *, most: int) -> None:
    """Tokenize the next rows of a loader, without drawing them.

    Args:
        loader: its rows are tokenized on access.
        name: name of the data in messages.
        most: largest number of rows to check; tokenizing takes milliseconds per row, too long for large datasets.

    Raises:
        DataError: a row is too long, cannot be rendered or has nothing to train on. The message lists the first such rows.
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
        reasons = "".join(f"\n  {reason}" for reason in bad[:_LISTED])
        raise DataError(f"{len(bad)} of the first {len(numbers)} rows of {name} cannot be used:{reasons}{more}")
    if bad:
        raise DataError(bad[0])
    if dropped:
        _log.warning("%d of the first %d rows of %s are too long and dropped", dropped, len(numbers), name)
    if len(numbers) < len(loader.dataset) and numbers:
        _log.info(
            "checked the first %d of %d rows of %s; the others are checked when they are used (data.check_rows)",
            len(numbers),
            len(loader.dataset),
            name,
        )
