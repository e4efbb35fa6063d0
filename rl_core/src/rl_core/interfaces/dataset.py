"""What is asked: a map-style collection of records."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rl_core.data.datasets import Record

__all__ = ["Dataset", "Record"]


class Dataset(ABC):
    """A finite, indexable collection of records; index i is always the same record.

    One that reads rows may say more: `place(index)`, where the row of a record is, for errors; `asked(index)`, what the row
    asks as it is written there, by which rows are held out; `skipped` and `reasons`, how many bad rows were left out and why;
    `firsts`, numbers of records that between them have all that a chat template may not take, which are looked at first.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...
