"""The refit methods of an engine whose replicas are workers: on all replicas, or only on those that were restarted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.config.schema import DeadlineConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.replica_rows import equal_answer, generate_on
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from rl_core.weights.fingerprint import same_digests_on_every_replica


class ReplicaRefits(GenerationInterface):
    """Refits replicas together; they must agree on digests and versions."""

    @abstractmethod
    def _run(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every replica of the refit and wait."""

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        dtypes: Mapping[str, str] = equal_answer(self._run("prepare_refit_info", info), "prepare_refit_info")
        return dtypes

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        self._run("update_weights", ipc_handles)

    def weight_fingerprint(self) -> str:
        fingerprints: list[str] = self._run("weight_fingerprint")
        if len(set(fingerprints)) > 1:
            self.weight_digests()  # names the tensors
        return fingerprints[0]

    def weight_digests(self) -> dict[str, str]:
        return same_digests_on_every_replica(self._run("weight_digests"))

    def invalidate_kv_cache(self) -> bool:
        return all(self._run("invalidate_kv_cache"))


class RestartedReplicas(ReplicaRefits):
    """The replicas of an engine that were restarted and have no weights; only for their refit.

    No other replica is called, so rows in progress there continue. A death is raised to the owner of weight synchronization,
    which restarts the replica.

    Args:
        group: all replicas.
        ranks: the restarted ones.
        processes: number of processes that load weights, per replica.
        restarts: number of workers of the engine restarted so far.
        deadlines: timeouts by kind of call.
    """

    def __init__(
        self, group: WorkerGroup, ranks: Sequence[int], *, processes: int, restarts: int, deadlines: DeadlineConfig
    ) -> None:
        self._group, self.ranks, self._processes = group, list(ranks), processes
        self._restarts, self._deadlines = restarts, deadlines

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data` with the restarted replicas, for the canary.

        Raises:
            WorkerDiedError: a replica died.
        """
        return generate_on(self._group, data, greedy=greedy, deadline_s=self._deadlines.generate_s, ranks=self.ranks)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("finish_generation")
        return True

    @property
    def num_workers(self) -> int:
        return len(self.ranks) * self._processes

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def weight_version(self) -> int:
        return int(equal_answer(self._run("get_weight_version"), "get_weight_version"))

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        # A replica counts the processes of all replicas before it, of which only those of restarted ones join.
        left_out = {rank: (rank - index) * self._processes for index, rank in enumerate(self.ranks)}
        calls = {rank: (ip, port, world_size, number) for rank, number in left_out.items()}
        return [self._group.submit_some("init_collective", calls)]

    def update_weights_from_collective(self) -> list[Any]:
        return [self._group.submit_some("update_weights_from_collective", dict.fromkeys(self.ranks, ()))]

    def _run(self, method: str, *args: Any) -> list[Any]:
        calls = self._group.submit_some(method, dict.fromkeys(self.ranks, args), deadline_s=self._deadlines.refit_s)
        return list(calls.result())
