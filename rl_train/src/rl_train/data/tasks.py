"""Which task the records of a dataset belong to."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rl_core.errors import DataError

_log = logging.getLogger("rlcore")
_UNNAMED = (None, "default")
"""Task names of records that name no task."""


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """The task of each record of a dataset: the one that the dataset or the record names, or the only task of the run.

    Attributes:
        fixed: task of all records; None if each record has its own.
        known: tasks of the run; empty if nothing is scored, so that names are not checked.
        section: section of the config that names the tasks of the run.
        replaced: name in the records that stands for the only task of the run.
    """

    fixed: str | None = None
    known: Collection[str] = ()
    section: str = "env"
    replaced: str | None = None

    def of_record(self, named: str | None) -> str | None:
        """The task of a record that names this task, or none.

        Raises:
            DataError: the name conflicts with that of the first record.
        """
        if self.fixed is not None:
            return self.fixed
        if len(self.known) != 1:
            return named
        if named in self.known and self.replaced is not None:
            raise DataError(
                f"its task_name is {named!r}, but that of the first record is {self.replaced!r}, which `{self.section}` does "
                f"not have. Add a section {self.section}.{self.replaced}, or correct the name"
            )
        return next(iter(self.known)) if named in (*_UNNAMED, self.replaced) else named

    def check(self, task: str | None) -> None:
        """Check that the task of a row has an environment.

        Raises:
            DataError: it has none.
        """
        if not self.known or task in self.known:
            return
        tasks = ", ".join(self.known)
        if task in _UNNAMED:
            raise DataError(
                f"it has no task_name, and `{self.section}` has several tasks ({tasks}): set `task_name` in the section of the "
                "dataset, or in each record"
            )
        raise DataError(
            f"its task_name is {task!r}, but `{self.section}` has no such task. Tasks in `{self.section}`: {tasks}. Add a "
            f"section {self.section}.{task}, or correct the name"
        )


def choose_tasks(
    records: Any, *, fixed: str | None, known: Collection[str], section: str, name: str, component: str | None
) -> TaskChoice:
    """Choose how the records of a dataset get their tasks.

    Args:
        records: map-style dataset of records.
        fixed: task that its section sets.
        known: tasks of the run.
        section: section of the config that names them.
        name: name of the dataset in warnings.
        component: its component, whose records may name a task of that name; None if it has none.
    """
    if fixed is not None or len(known) != 1 or not len(records):
        return TaskChoice(fixed=fixed, known=known, section=section)
    try:
        first = records[0].get("task_name")
    except DataError:  # a bad row, which is reported or skipped when it is tokenized
        first = None
    if first in (*_UNNAMED, *known):
        return TaskChoice(known=known, section=section)
    if first != component:
        _log.warning(
            "the rows of %s name the task %r, which `%s` does not have: its only task, %r, scores them. Set `task_name: %s` "
            "in the section of the dataset if this is intended.",
            name,
            first,
            section,
            *known,
            *known,
        )
    return TaskChoice(known=known, section=section, replaced=first)
