"""How many expected answers of a run's data its environments reward: what they cannot parse can never be learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_train.assembly.preparation import Preparation
from rl_train.rollouts.records import expected_answer
from rl_train.workbench.answers import best_form
from rl_train.workbench.trial import rows_of_task, trial_of_run


@dataclass(frozen=True, kw_only=True)
class GradedAnswers:
    """The expected answers of one task, graded by its environment."""

    task: str
    form: str
    """The text around the answer, `{0}`, in which most of them are rewarded."""
    graded: int
    """Number of rows with an expected answer that were graded."""
    rows_read: int
    """Number of rows in which expected answers were looked for: the first of each dataset."""
    rows: int
    """Number of rows of the task."""
    unrewarded: tuple[str, ...]
    """Expected answers that get no more reward than a wrong one, in any of the usual forms."""
    locations: tuple[str, ...]
    """The location of the row of each of them."""
    unscored: int
    """Number of rows that the environment does not score."""


def grade_expected_answers(prepared: Preparation, *, limit: int) -> Iterator[GradedAnswers]:
    """Grade the expected answers of the first rows of each task that has any.

    Tasks whose environment parses tool calls are left out, because their answers need the tokens of a model.

    Args:
        prepared: The run.
        limit: Maximum number of rows of each task.

    Raises:
        UserError: An environment cannot be created, or fails.
    """
    for task in prepared.config.env:
        first, total = rows_of_task(task, prepared, limit=limit)
        rows = [row for row in first if expected_answer(row.metadata) is not None]
        if not rows or (trial := trial_of_run(task, prepared, rows, total)).reads_tool_calls:
            continue
        expected = [str(expected_answer(row.metadata)) for row in rows]
        environment = trial.make()
        try:
            form, rewards, unscored = best_form(trial, environment, rows, expected)
        finally:
            environment.shutdown()
        unrewarded = [row for row in range(len(rows)) if row not in rewards and row not in unscored]
        yield GradedAnswers(
            task=task,
            form=form,
            graded=len(rows),
            rows_read=len(first),
            rows=total,
            unrewarded=tuple(expected[row] for row in unrewarded),
            locations=tuple(rows[row].location for row in unrewarded),
            unscored=len(unscored),
        )
