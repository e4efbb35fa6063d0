"""An environment as a pool of processes: a batch is split over them and put back together in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.cluster.actor_pool import Pool
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_core.interfaces.environment_checks import checked_metrics, checked_return


class EnvironmentPool(EnvironmentInterface):
    """Several instances of one environment behind the interface of one.

    Args:
        pool: the instances.
        task_name: named in errors.
        deadline_s: longest wait for a turn of the whole batch.
    """

    def __init__(self, pool: Pool, *, task_name: str, deadline_s: float) -> None:
        self._pool = pool
        self._task_name = task_name
        self._deadline_s = deadline_s

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        rows = len(message_log_batch)
        share = -(-rows // self._pool.num_actors)
        calls = [(message_log_batch[i : i + share], metadata[i : i + share]) for i in range(0, rows, share)]
        found = self._pool.map("step", calls, deadline_s=self._deadline_s)
        parts = [
            checked_return(part, rows=len(call[0]), task_name=self._task_name, environment_class=self._pool.worker_class)
            for call, part in zip(calls, found, strict=True)
        ]
        return EnvironmentReturn(
            observations=[message for part in parts for message in part.observations],
            metadata=[state for part in parts for state in part.metadata],
            next_stop_strings=[stops for part in parts for stops in part.next_stop_strings],
            rewards=_joined(parts),
            terminateds=torch.cat([part.terminateds for part in parts]),
            answers=[answer for part in parts for answer in (part.answers or [None] * len(part.observations))],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        [found] = self._pool.map("global_post_process_and_metrics", [(batch,)], deadline_s=self._deadline_s)
        batch, metrics = checked_metrics(found, task_name=self._task_name, environment_class=self._pool.worker_class)
        return batch, {**metrics}

    def shutdown(self) -> None:
        self._pool.shutdown()


def _joined(parts: list[EnvironmentReturn]) -> torch.Tensor | dict[str, torch.Tensor]:
    """The rewards of all shares; a share without one of the others' named rewards has 0.0 for it in all of its rows."""
    if not any(isinstance(part.rewards, Mapping) for part in parts):
        return torch.cat([part.rewards for part in parts if isinstance(part.rewards, torch.Tensor)])
    named = [part.rewards if isinstance(part.rewards, Mapping) else {"reward": part.rewards} for part in parts]
    sizes = [len(part.observations) for part in parts]
    return {
        name: torch.cat([share[name] if name in share else torch.zeros(size) for share, size in zip(named, sizes, strict=True)])
        for name in dict.fromkeys(name for share in named for name in share)
    }
