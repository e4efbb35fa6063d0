"""An environment as a pool of processes, and rollouts that could not be scored.

Batches are split over the processes, and the results merged in order. Some errors may be retried; a run accepts a limited
number of rollouts that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.scorer import StepResult, environment_return
from rl_core.errors import DeadlineExceededError, RLCoreError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message, keeps_sessions
from rl_core.testing.outputs.environment import checked_metrics, checked_return
from rl_train.pools.pool import ActorKey, ObjectPool, Pool
from rl_train.rollouts.trajectory import Trajectory

_METRICS_RETRIES = 2
"""How often metrics are computed again after the worker died or exceeded the timeout."""
_log = logging.getLogger("rlcore")


class EnvironmentPool(EnvironmentInterface):
    """Several instances of an environment behind its interface.

    Args:
        pool: the instances. A call that exceeds the pool's deadline fails, and is not repeated.
        task_name: used in errors.
        keeps_sessions: whether the environment has `reset` or `close`, see `keeps_sessions`.
        reads_token_ids: whether the last message of a conversation has its sampled tokens as `token_ids`.
    """

    def __init__(self, pool: Pool, *, task_name: str, keeps_sessions: bool = False, reads_token_ids: bool = False) -> None:
        self.pool, self.keeps_sessions, self.reads_token_ids = pool, keeps_sessions, reads_token_ids
        self._task_name = task_name

    @classmethod
    def of(cls, environment: EnvironmentInterface, task_name: str) -> EnvironmentPool:
        """The environment if it is a pool, else a pool of this object, whose calls block and have no deadline."""
        if isinstance(environment, EnvironmentPool):
            return environment
        return cls(
            ObjectPool(environment),
            task_name=task_name,
            keeps_sessions=keeps_sessions(type(environment)),
            reads_token_ids=getattr(environment, "reads_token_ids", False),
        )

    async def step_rows(
        self, message_log_batch: list[Any], metadata: list[Any], *, on: ActorKey | None = None
    ) -> list[StepResult]:
        """Call `step` of one worker for these rows, and check the results; rollouts retry their own steps."""
        call = self.pool.submit("step", message_log_batch, metadata, on=on)
        returned = call.result() if call.done() else await asyncio.wrap_future(call)
        return self._checked(returned, len(metadata))

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        size = -(-len(metadata) // self.pool.num_actors)
        shards = [slice(start, start + size) for start in range(0, len(metadata), size)]
        calls = [self.pool.submit("step", message_log_batch[shard], metadata[shard]) for shard in shards]
        results = [self._checked(call.result(), len(metadata[shard])) for call, shard in zip(calls, shards, strict=True)]
        return environment_return([result for shard in results for result in shard])

    def _checked(self, returned: Any, rows: int) -> list[StepResult]:
        return checked_return(returned, rows=rows, task_name=self._task_name, environment_class=self.pool.worker_class)

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        returned = self._metrics(batch)
        batch, metrics = checked_metrics(returned, task_name=self._task_name, environment_class=self.pool.worker_class)
        return batch, {**metrics}

    def _metrics(self, batch: BatchedDataDict[Any]) -> Any:
        """What a worker returns for a batch; another one is asked if it dies, because it may have died while it was idle."""
        for _ in range(_METRICS_RETRIES):
            try:
                return self.pool.submit("global_post_process_and_metrics", batch).result()
            except (WorkerDiedError, DeadlineExceededError) as error:
                _log.warning("env.%s: the metrics are computed again: %s", self._task_name, error)
        return self.pool.submit("global_post_process_and_metrics", batch).result()

    def shutdown(self) -> None:
        self.pool.shutdown()


WINDOW = 20
"""Number of steps over which `rollout.max_failed_share` is measured."""


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
