"""Rollouts that could not be scored: which errors may be retried, and how many a run accepts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.errors import DeadlineExceededError, RLCoreError, UserError, WorkerDiedError, WorkerError
from rl_train.rollouts.trajectory import Trajectory

WINDOW = 20
"""Number of steps over which `rollout.max_failed_share` is measured."""
_log = logging.getLogger("rlcore")


class RowNotSampledError(RLCoreError):
    """The engine could not sample a row, for example because its server did not respond."""


class RolloutTimeoutError(Exception):
    """A rollout did not end in time."""


class RowFailedError(Exception):
    """An environment could not respond to one row for a reason that is not the model's (`EnvironmentReturn.failures`)."""


class StepFailedError(Exception):
    """An environment could not respond to one row, or the engine could not sample it; the call may succeed if it is repeated.

    Args:
        cause: the exception of the environment, its worker's death, its timeout, or the engine's failure.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__("\n".join([str(cause), *getattr(cause, "__notes__", ())]))
        self.cause = cause

    @property
    def headline(self) -> str:
        """Type and first line of the original exception, without worker and traceback, so that equal errors have equal text."""
        if isinstance(self.cause, WorkerDiedError):
            return "WorkerDiedError: the environment's worker died"
        if isinstance(self.cause, DeadlineExceededError):
            return "DeadlineExceededError: the step exceeded its timeout"
        origin = self.cause.__cause__ if isinstance(self.cause, WorkerError) and self.cause.__cause__ else self.cause
        lines = str(origin).strip().splitlines()
        return f"{type(origin).__name__}: {lines[0]}" if lines else type(origin).__name__


def may_be_retried(error: BaseException) -> bool:
    """Whether an error of an environment call concerns only its rows.

    A mistake in the config and a return value that violates the interface end the run: they would fail in every step.
    """
    if isinstance(error, WorkerError | DeadlineExceededError):
        return error.exit_code != UserError.exit_code
    return isinstance(error, Exception) and not isinstance(error, RLCoreError)


@dataclass
class _Step:
    number: int
    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class FailureLimit:
    """Stops a run if too many rollouts of the last steps could not be scored because of errors.

    Steps before the first one count as steps without failures, so a single failed row does not stop a new run.

    Args:
        max_share: `rollout.max_failed_share`.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._steps: list[_Step] = []
        self._texts: dict[str, str] = {}

    def expect(self, step: int, rows: int) -> None:
        """Add the rows that a step trains on to the total; rows of replacement groups are not counted."""
        self._of(step).rows += rows

    def count(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Count the failed ones among finished rollouts.

        Raises:
            RLCoreError: the share of failed rows is above the limit.
        """
        failed = [row for row in trajectories if row.failure is not None]
        if not failed:
            return
        self._of(step).errors.update(str(row.failure) for row in failed)
        self._texts.update({str(row.failure): row.failure_details for row in failed})
        worst, count = Counter(row.failure for row in failed).most_common(1)[0]
        _log.warning(
            "step %d: %d of %d rollouts could not be scored; the most frequent error (%d): %s",
            step,
            len(failed),
            len(trajectories),
            count,
            worst,
        )
        self._check()

    def state_dict(self) -> dict[str, Any]:
        """The steps of the window with their errors, so that a resumed run counts them too."""
        return {
            "steps": [{"number": step.number, "rows": step.rows, "errors": dict(step.errors)} for step in self._steps],
            "texts": {error: self._texts[error] for step in self._steps for error in step.errors},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._steps = [_Step(step["number"], step["rows"], Counter(step["errors"])) for step in state["steps"]]
        self._texts = dict(state["texts"])

    def _of(self, step: int) -> _Step:
        if not self._steps or self._steps[-1].number != step:
            self._steps = [*self._steps, _Step(step)][-WINDOW:]
        return self._steps[-1]

    def _check(self) -> None:
        rows = sum(step.rows for step in self._steps)
        errors = sum((step.errors for step in self._steps), Counter[str]())
        share = errors.total() / (rows * WINDOW / len(self._steps))
        if share > self._max_share:
            raise too_many_failures(
                errors,
                self._texts,
                f"{errors.total()} rollouts of the last {len(self._steps)} steps could not be scored: {share:.0%} of the rows "
                f"of {WINDOW} steps, and `rollout.max_failed_share` is {self._max_share:g}.",
            )


def refuse_total_failure(trajectories: Sequence[Trajectory]) -> None:
    """Stop at once if errors kept every rollout from being scored.

    Raises:
        RLCoreError: all rollouts failed; includes the most frequent error.
    """
    failed = [row for row in trajectories if row.failure is not None]
    if failed and len(failed) == len(trajectories):
        texts = {str(row.failure): row.failure_details for row in failed}
        errors = Counter(str(row.failure) for row in failed)
        raise too_many_failures(errors, texts, f"None of {len(failed)} rollouts could be scored.")


def refuse_any_failure(trajectories: Sequence[Trajectory]) -> None:
    """Refuse failed rollouts in an evaluation, because its scores must cover all prompts.

    Raises:
        RLCoreError: a rollout failed; includes the most frequent error.
    """
    failed = [row for row in trajectories if row.failure is not None]
    if failed:
        texts = {str(row.failure): row.failure_details for row in failed}
        what = f"{len(failed)} of {len(trajectories)} rollouts could not be scored, so the scores would not be of all prompts."
        raise too_many_failures(Counter(str(row.failure) for row in failed), texts, what)


def too_many_failures(errors: Counter[str], texts: dict[str, str], what: str) -> RLCoreError:
    """The error that ends the run, with the most frequent failure."""
    worst, count = errors.most_common(1)[0]
    return RLCoreError(f"{what} The most frequent error ({count} of {errors.total()}):\n{texts[worst]}")
