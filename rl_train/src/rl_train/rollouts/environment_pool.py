"""An environment as a pool of processes: splits batches over them and merges the results in order."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_train.pools.pool import ActorKey, Pool
from rl_train.rollouts.environment_checks import checked_metrics, checked_return


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
        return self._pool.submit(method, *args, deadline_s=self._deadline_s, max_restarts=0, on=on)

    def submit_step(
        self, message_log_batch: list[Any], metadata: list[Any], *, on: ActorKey | None = None
    ) -> Future[EnvironmentReturn]:
        """Call `step` of one worker for these rows, without waiting; the future has the checked return value.

        A call whose worker dies or exceeds the timeout is not retried here; rollouts retry their own steps.
        """
        call = self.submit("step", message_log_batch, metadata, on=on)
        checked: Future[EnvironmentReturn] = Future()
        checked.set_running_or_notify_cancel()  # so that an event loop that gives up on it cannot cancel it

        def check(ended: Future[Any]) -> None:
            try:
                checked.set_result(self._checked(ended.result(), rows=len(metadata)))
            except BaseException as error:  # also that of a cancelled call
                checked.set_exception(error)

        call.add_done_callback(check)
        return checked

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        rows = len(message_log_batch)
        chunk = -(-rows // self._pool.num_actors)
        calls = [(message_log_batch[i : i + chunk], metadata[i : i + chunk]) for i in range(0, rows, chunk)]
        results = self._pool.map("step", calls, deadline_s=self._deadline_s)
        returns = [self._checked(one, rows=len(call[0])) for call, one in zip(calls, results, strict=True)]
        return EnvironmentReturn(
            observations=[message for one in returns for message in one.observations],
            metadata=[state for one in returns for state in one.metadata],
            next_stop_strings=[stops for one in returns for stops in one.next_stop_strings],
            rewards=_concat_rewards(returns),
            terminateds=torch.cat([one.terminateds for one in returns]),
            answers=[answer for one in returns for answer in (one.answers or [None] * len(one.observations))],
            scored=_concat_scored(returns),
            failures=[failure for one in returns for failure in (one.failures or [None] * len(one.observations))],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        [returned] = self._pool.map("global_post_process_and_metrics", [(batch,)], deadline_s=self._deadline_s)
        batch, metrics = checked_metrics(returned, task_name=self._task_name, environment_class=self._pool.worker_class)
        return batch, {**metrics}

    def shutdown(self) -> None:
        self._pool.shutdown()

    def _checked(self, returned: Any, *, rows: int) -> EnvironmentReturn:
        return checked_return(returned, rows=rows, task_name=self._task_name, environment_class=self._pool.worker_class)


def _concat_scored(returns: list[EnvironmentReturn]) -> torch.Tensor | None:
    """Which rows of all parts were scored; None if all were."""
    if all(one.scored is None for one in returns):
        return None
    return torch.cat([torch.ones(len(p.observations), dtype=torch.bool) if p.scored is None else p.scored for p in returns])


def _concat_rewards(returns: list[EnvironmentReturn]) -> torch.Tensor | dict[str, torch.Tensor]:
    """The rewards of all parts; a named reward that a part does not have is 0.0 in its rows."""
    if not any(isinstance(one.rewards, Mapping) for one in returns):
        return torch.cat([one.rewards for one in returns if isinstance(one.rewards, torch.Tensor)])
    named = [one.rewards if isinstance(one.rewards, Mapping) else {"reward": one.rewards} for one in returns]
    sizes = [len(one.observations) for one in returns]
    return {
        name: torch.cat([chunk[name] if name in chunk else torch.zeros(size) for chunk, size in zip(named, sizes, strict=True)])
        for name in dict.fromkeys(name for chunk in named for name in chunk)
    }
