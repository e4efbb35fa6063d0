"""An environment as a pool of processes: a batch is split over them and put back together in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.cluster.actor_pool import Pool
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message


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
        parts = [EnvironmentReturn(*part) for part in self._pool.map("step", calls, deadline_s=self._deadline_s)]
        for call, part in zip(calls, parts, strict=True):
            self._check(len(call[0]), part)
        return EnvironmentReturn(
            observations=[message for part in parts for message in part.observations],
            metadata=[state for part in parts for state in part.metadata],
            next_stop_strings=[stops for part in parts for stops in part.next_stop_strings],
            rewards=_joined(parts),
            terminateds=torch.cat([torch.as_tensor(part.terminateds) for part in parts]),
            answers=[answer for part in parts for answer in (part.answers or [None] * len(part.observations))],
        )

    def _check(self, rows: int, part: EnvironmentReturn) -> None:
        rewards = part.rewards if isinstance(part.rewards, Mapping) else {"rewards": part.rewards}
        found = {name: len(values) for name, values in rewards.items()}
        found |= {"observations": len(part.observations), "metadata": len(part.metadata)}
        found |= {"terminateds": len(part.terminateds), "next_stop_strings": len(part.next_stop_strings)}
        wrong = {name: size for name, size in found.items() if size != rows}
        if wrong:
            raise RLCoreError(
                f"The environment of task {self._task_name!r} was asked about {rows} rows and answered with "
                + ", ".join(f"{size} {name}" for name, size in wrong.items())
                + ". Every part of an EnvironmentReturn has one entry a row, in the order of the rows."
            )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        [(batch, metrics)] = self._pool.map("global_post_process_and_metrics", [(batch,)], deadline_s=self._deadline_s)
        return batch, metrics

    def shutdown(self) -> None:
        self._pool.shutdown()


def _joined(parts: list[EnvironmentReturn]) -> torch.Tensor | dict[str, torch.Tensor]:
    """The rewards of all shares; a share without one of the others' named rewards has 0.0 for it in all of its rows."""
    if not any(isinstance(part.rewards, Mapping) for part in parts):
        return torch.cat([torch.as_tensor(part.rewards).float() for part in parts])
    named = [part.rewards if isinstance(part.rewards, Mapping) else {"reward": part.rewards} for part in parts]
    sizes = [len(part.observations) for part in parts]
    return {
        name: torch.cat(
            [
                torch.as_tensor(share[name]).float() if name in share else torch.zeros(size)
                for share, size in zip(named, sizes, strict=True)
            ]
        )
        for name in dict.fromkeys(name for share in named for name in share)
    }
