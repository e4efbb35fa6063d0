"""Holds rows out of training by a hash of their prompt, so that the split does not depend on the order of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_train.data.conversations import without_answer
from rl_train.data.image_sources import image_identity


class Subset(Sequence[Any]):
    """Some records of a dataset in a given order; rows keep their locations.

    Args:
        records: map-style dataset of records.
        numbers: Indices of the selected records.

    Attributes:
        firsts: Selected records that are among `firsts` of the dataset.
        prompt_of: Prompt of a record as in its row, if the dataset has this method.
        fingerprint: Fingerprint of the dataset and the selection; None if the dataset has none.
    """

    def __init__(self, records: Any, numbers: Sequence[int]) -> None:
        self._records = records
        self._numbers = numbers
        wanted = set(getattr(records, "firsts", ()))
        self.firsts = tuple(index for index, number in enumerate(numbers) if number in wanted)
        whole = getattr(records, "fingerprint", None)
        chosen = hashlib.blake2b(f"{whole} {list(numbers)}".encode(), digest_size=8)
        prompt_of = getattr(records, "prompt_of", None)
        if prompt_of is not None:
            self.prompt_of = lambda index: prompt_of(numbers[index])
        self.fingerprint = None if whole is None else chosen.hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._records[self._numbers[index]]

    def row_location(self, index: int) -> str:
        """Location of the row of a record."""
        return row_location(self._records, self._numbers[index])


def held_out(records: Any, *, fraction: float, seed: int, name: str) -> tuple[Subset, Subset]:
    """The remaining records in their order, and the held-out records in an order that depends on the seed.

    A hash of the prompt decides whether a record is held out: adding or reordering rows does not move other rows, and
    records with the same prompt are all on one side. A smaller fraction holds out the first n of the same held-out records.

    Args:
        records: map-style dataset of records.
        fraction: Probability that a record is held out.
        seed: Seed of the selection.
        name: Name of the dataset in errors.

    Raises:
        DataError: One of the two sides is empty.
    """
    draws = [int.from_bytes(prompt_digest(records, index, seed)) / 2**64 for index in range(len(records))]
    remaining = [index for index, draw in enumerate(draws) if draw >= fraction]
    out = sorted((index for index, draw in enumerate(draws) if draw < fraction), key=lambda index: (draws[index], index))
    if not remaining or not out:
        raise DataError(
            f"split.validation {fraction} of the {len(draws)} records of {name} holds out {len(out)} and leaves "
            f"{len(remaining)}: use more data, another fraction, or separate validation data"
        )
    return Subset(records, remaining), Subset(records, out)


def row_location(records: Any, index: int) -> str:
    """Location of a record's row, if its dataset has one."""
    location = getattr(records, "row_location", None)
    return str(location(index)) if location is not None else f"record {index}"


def prompt_digest(records: Any, index: int, seed: int = 0) -> bytes:
    """Eight bytes that only depend on the seed and the prompt of a record.

    Raises:
        DataError: The prompt is neither text nor made of texts and numbers.
    """
    own = getattr(records, "prompt_of", None)
    prompt = own(index) if own is not None else _prompt_of(records[index])
    try:
        text = json.dumps([seed, prompt], sort_keys=True, ensure_ascii=False, default=image_identity)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the prompt of {row_location(records, index)} cannot be hashed ({error}): records must consist of texts and "
            "numbers to be compared"
        ) from error
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _prompt_of(record: Mapping[str, Any]) -> Any:
    if "messages" in record:
        return without_answer(record["messages"])
    return record.get("prompt", record)
