"""An environment as a pool of processes: splits batches over them and merges the results in order."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.step_results import StepResult, environment_return
from rl_core.errors import DeadlineExceededError, WorkerDiedError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_core.testing.outputs.environment import checked_metrics, checked_return
from rl_train.pools.pool import ActorKey, Pool

_METRICS_RETRIES = 2
"""How often metrics are computed again after the worker died or exceeded the timeout."""
_log = logging.getLogger("rlcore")


class EnvironmentPool(EnvironmentInterface):
    """Several instances of an environment behind its interface.

    Args:
        pool: the instances.
        task_name: used in errors.
        deadline_s: timeout in seconds for a turn of the whole batch.
        keeps_sessions: whether the environment has `reset` or `close`, see `keeps_sessions`.
    """

    def __init__(self, pool: Pool, *, task_name: str, deadline_s: float, keeps_sessions: bool = False) -> None:
        self.keeps_sessions = keeps_sessions
        self._pool = pool
        self._task_name = task_name
        self._deadline_s = deadline_s

    @property
    def slots(self) -> int:
        """Number of calls that run at the same time."""
        return self._pool.num_actors * self._pool.max_concurrency

    @property
    def max_concurrency(self) -> int:
        """Number of calls that a worker runs at the same time."""
        return self._pool.max_concurrency

    @property
    def workers(self) -> list[ActorKey]:
        """The current workers."""
        return self._pool.actors

    def submit(self, method: str, *args: Any, on: ActorKey | None = None) -> Future[Any]:
        """Call a method of one worker, without waiting; a call that dies or exceeds the timeout is not repeated.

        Args:
            method: the environment's method.
            args: its arguments.
            on: the worker; any one by default.
        """
        return self._pool.submit(method, *args, deadline_s=self._deadline_s, on=on)

    def submit_step(
        self, message_log_batch: list[Any], metadata: list[Any], *, on: ActorKey | None = None
    ) -> Future[list[StepResult]]:
        """Call `step` of one worker for these rows, without waiting; the future has the checked results.

        A call whose worker dies or exceeds the timeout is not retried here; rollouts retry their own steps.
        """
        call = self.submit("step", message_log_batch, metadata, on=on)
        checked: Future[list[StepResult]] = Future()
        checked.set_running_or_notify_cancel()  # so that an event loop that gives up on it cannot cancel it

        def check(ended: Future[Any]) -> None:
            try:
                checked.set_result(
                    checked_return(
                        ended.result(),
                        rows=len(metadata),
                        task_name=self._task_name,
                        environment_class=self._pool.worker_class,
                    )
                )
            except BaseException as error:  # also that of a cancelled call
                checked.set_exception(error)

        call.add_done_callback(check)
        return checked

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        rows = len(message_log_batch)
        chunk = -(-rows // self._pool.num_actors)
        calls = [self.submit_step(message_log_batch[i : i + chunk], metadata[i : i + chunk]) for i in range(0, rows, chunk)]
        return environment_return([result for call in calls for result in call.result()])

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        returned = self._metrics(batch)
        batch, metrics = checked_metrics(returned, task_name=self._task_name, environment_class=self._pool.worker_class)
        return batch, {**metrics}

    def _metrics(self, batch: BatchedDataDict[Any]) -> Any:
        """What a worker returns for a batch; another one is asked if it dies, because it may have died while it was idle."""
        for _ in range(_METRICS_RETRIES):
            try:
                return self.submit("global_post_process_and_metrics", batch).result()
            except (WorkerDiedError, DeadlineExceededError) as error:
                _log.warning("env.%s: the metrics are computed again: %s", self._task_name, error)
        return self.submit("global_post_process_and_metrics", batch).result()

    def shutdown(self) -> None:
        self._pool.shutdown()
