"""Rows held out of training, by what they ask and not by where they stand; knows no tokenizer and no source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_train.data.conversations import without_answer


class Subset(Sequence[Any]):
    """Some records of a dataset, in an order of their own; they keep their places.

    Args:
        records: map-style, of records.
        numbers: Which of them.

    Attributes:
        firsts: Those of them that the dataset has as the first of a kind.
        fingerprint: The dataset's and theirs; None where the dataset has none.
    """

    def __init__(self, records: Any, numbers: Sequence[int]) -> None:
        self._records = records
        self._numbers = numbers
        wanted = set(getattr(records, "firsts", ()))
        self.firsts = tuple(index for index, number in enumerate(numbers) if number in wanted)
        whole = getattr(records, "fingerprint", None)
        chosen = hashlib.blake2b(f"{whole} {list(numbers)}".encode(), digest_size=8)
        self.fingerprint = None if whole is None else chosen.hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._records[self._numbers[index]]

    def place(self, index: int) -> str:
        """Where the row of a record is."""
        return place_of(self._records, self._numbers[index])


def held_out(records: Any, *, fraction: float, seed: int, name: str) -> tuple[Subset, Subset]:
    """The records that stay, in their order, and those that are held out, in an order drawn from the seed.

    A record is held out by a hash of what it asks: new rows move no other row, rows may change places, and records that ask the
    same are all on one side. Of the held-out ones, the first n are those that a smaller fraction would hold out.

    Args:
        records: map-style, of records.
        fraction: With which probability one is held out.
        seed: Another one holds out others.
        name: What errors call the dataset.

    Raises:
        DataError: One of the two sides has no record.
    """
    draws = [_draw(records, index, seed) for index in range(len(records))]
    kept = [index for index, draw in enumerate(draws) if draw >= fraction]
    out = sorted((index for index, draw in enumerate(draws) if draw < fraction), key=lambda index: (draws[index], index))
    if not kept or not out:
        raise DataError(
            f"split.validation {fraction} of the {len(draws)} records of {name} holds out {len(out)} and leaves {len(kept)}: "
            "give more data or another fraction, or name validation data of its own"
        )
    return Subset(records, kept), Subset(records, out)


def place_of(records: Any, index: int) -> str:
    """Where a record's row is, as far as its dataset knows."""
    place = getattr(records, "place", None)
    return str(place(index)) if place is not None else f"record {index}"


def _draw(records: Any, index: int, seed: int) -> float:
    """A number of [0, 1), from the seed and what the record asks alone."""
    own = getattr(records, "asked", None)
    asked = own(index) if own is not None else _asked(records[index])
    try:
        text = json.dumps([seed, asked], sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place_of(records, index)} cannot be told from others by what it asks ({error}): split.validation needs records "
            "of texts and numbers"
        ) from error
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()) / 2**64


def _asked(record: Mapping[str, Any]) -> Any:
    if "messages" in record:
        return without_answer(record["messages"])
    return record.get("prompt", record)
