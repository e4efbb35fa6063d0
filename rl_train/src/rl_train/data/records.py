"""Rows of any source, each with its place, and the records that the good ones amount to; knows no file and no field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar, overload

from rl_core.errors import DataError
from rl_train.data.dataset_config import OnBadRow

RecordT = TypeVar("RecordT")
RecordT_co = TypeVar("RecordT_co", covariant=True)

_REASONS_KEPT = 5


class Rows(Protocol):
    """What every source gives: rows by number, each with a place that a person can find."""

    name: str
    """What errors call the source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """The fields of a row.

        Raises:
            DataError: It cannot be read.
        """
        ...

    def place(self, index: int) -> str:
        """Where the row is: file and line, or file and row number."""
        ...


class Form(Protocol[RecordT_co]):
    """What the fields of a row mean."""

    called: str
    """What a record is called in errors."""

    def records(self, row: dict[str, Any]) -> Sequence[RecordT_co]:
        """The records of one row.

        Raises:
            DataError: The row is bad.
        """
        ...

    def kind(self, record: Any) -> Hashable:
        """What a chat template may take of one record and not of another: its roles, whether it has tools."""
        ...

    def asked(self, row: dict[str, Any]) -> Any:
        """What a good row asks, as it is written there: its identity, whatever template or system message goes with it."""
        ...


class Records(Sequence[RecordT]):
    """The records that the rows of a source amount to.

    Every row is looked at once, at the start; a record is made anew when it is asked for, so that a source may keep its rows
    where they are.

    Args:
        rows: The source.
        form: What its fields mean.
        on_bad_row: What becomes of a bad row.

    Attributes:
        skipped: Bad rows left out, under `on_bad_row: skip`.
        reasons: Why, with their places: of the first few.
        firsts: Numbers of records: of every kind that there is, the first.
        fingerprint: Of all records in their order: another one, and a resumed run would see other rows than it would have.

    Raises:
        DataError: There is no good row, or a row is bad; names its place.
    """

    def __init__(self, rows: Rows, form: Form[RecordT], *, on_bad_row: OnBadRow) -> None:
        self.skipped = 0
        self.reasons: list[str] = []
        self._rows = rows
        self._form = form
        self._index: list[tuple[int, int]] = []
        kinds: dict[Any, int] = {}
        seen = hashlib.blake2b(digest_size=8)
        for number in range(len(rows)):
            try:
                made = form.records(rows[number])
            except DataError as error:
                reason = f"{rows.place(number)}: {error}"
                if on_bad_row is OnBadRow.ERROR:
                    raise DataError(reason) from error
                self.skipped += 1
                self.reasons = [*self.reasons, reason][:_REASONS_KEPT]
            else:
                for part, record in enumerate(made):
                    kinds.setdefault(form.kind(record), len(self._index))
                    self._index.append((number, part))
                    # What JSON has no word for counts by its type: a repr may hold an address, which no two processes share.
                    seen.update(json.dumps(record, skipkeys=True, default=lambda value: type(value).__name__).encode())
        self.firsts = tuple(kinds.values())
        self.fingerprint = seen.hexdigest()
        if not self._index:
            why = f"{self.skipped} bad rows skipped; the first: {self.reasons[0]}" if self.reasons else "it is empty"
            raise DataError(f"{rows.name} has no {form.called} to train on ({why})")

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> RecordT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordT]: ...

    def __getitem__(self, index: int | slice) -> RecordT | list[RecordT]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number, part = self._index[index]
        return self._form.records(self._rows[number])[part]

    def place(self, index: int) -> str:
        """Where the row of a record is."""
        return self._rows.place(self._index[index][0])

    def asked(self, index: int) -> Any:
        """What the row of a record asks: the same for every record that is made of it."""
        return self._form.asked(self._rows[self._index[index][0]])
