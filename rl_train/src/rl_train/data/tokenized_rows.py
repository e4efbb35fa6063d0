"""Tokenizes the records of a dataset on access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_train.data.bad_rows import BadRow, BadRowError
from rl_train.data.dataset_classes import record_of
from rl_train.data.holdout import row_location
from rl_train.data.task_choice import TaskChoice


class TokenizedRows(Sequence[Any]):
    """A dataset whose records are tokenized on access.

    Args:
        records: map-style dataset of records.
        process: turns a record into a row.
        tasks: the task of each record.
        name: name of the dataset in errors.
    """

    def __init__(self, records: Any, process: Callable[..., Any], *, tasks: TaskChoice, name: str = "dataset") -> None:
        self.records = records
        self._process = process
        self._tasks = tasks
        self._name = name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        try:
            record = dict(record_of(self.records, index, name=self._name))
            task = self._tasks.of_record(record.get("task_name"))
            if task is not None:
                record["task_name"] = task
            datum = self._process(record, idx=int(index))
            if datum.get("task_name") is None and task is not None:  # left out by the processor of a user
                datum = {**datum, "task_name": task}
            self._tasks.check(datum.get("task_name"))
        except DataError as error:
            raise BadRowError(BadRow.of(f"{self._name}: {row_location(self.records, index)}", error)) from error
        return datum
