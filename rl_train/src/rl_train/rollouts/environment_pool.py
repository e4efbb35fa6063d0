"""An environment as a pool of processes: splits batches over them and merges the results in order."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.step_results import StepResult, environment_return
from rl_core.errors import DeadlineExceededError, WorkerDiedError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message, keeps_sessions
from rl_core.testing.outputs.environment import checked_metrics, checked_return
from rl_train.pools.pool import ActorKey, ObjectPool, Pool

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
