"""A generation engine over the replicas of a worker group: the rows of one prompt stay on one replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.config.schema import DeadlineConfig, GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.group import OverWorkers
from rl_core.dispatch.rows import at_the_door
from rl_core.errors import WeightSyncError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from rl_core.interfaces.worker import GenerationWorker
from rl_core.weights.replicas import same_digests_on_every_replica

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

ROW_KEYS = ("input_ids", "input_lengths", "stop_strings", "sample_seeds", "max_new_tokens")


class DistributedGeneration(OverWorkers, GenerationInterface):
    """`GenerationWorker`s as one engine.

    Args:
        worker_class: the backend's worker.
        config: the section `policy.generation`; handed to each worker.
        cluster: where the replicas run; without one, a single replica runs in this process.
        num_workers: replicas; as many as the cluster has places by default.
        deadlines: how long to wait for what.
        env_vars: further environment variables of the workers.
    """

    def __init__(
        self,
        *,
        worker_class: type[GenerationWorker],
        config: GenerationConfig,
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            worker_class=worker_class,
            config=config,
            name="generation",
            cluster=cluster,
            num_workers=num_workers or config.num_workers,
            deadlines=deadlines,
            env_vars=env_vars,
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        self.wait_ready()
        return generate_on(self.group, data, greedy=greedy, deadline_s=self._deadlines.generate_s)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("finish_generation")
        return True

    @property
    def num_workers(self) -> int:
        return self.group.world_size

    @property
    def weight_version(self) -> int:
        """See `GenerationInterface`.

        Raises:
            WeightSyncError: the replicas have different versions.
        """
        version: int = self._same("get_weight_version")
        return version

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        self.wait_ready()
        return [self.group.submit_all("init_collective", ip, port, world_size)]

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        dtypes: Mapping[str, str] = self._same("prepare_refit_info", info)
        return dtypes

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        self._run("update_weights", ipc_handles)

    def update_weights_from_collective(self) -> list[Any]:
        self.wait_ready()
        return [self.group.submit_all("update_weights_from_collective")]

    def weight_fingerprint(self) -> str:
        fingerprints: list[str] = self._run("weight_fingerprint")
        if len(set(fingerprints)) > 1:
            self.weight_digests()  # names the tensors
        return fingerprints[0]

    def weight_digests(self) -> dict[str, str]:
        return same_digests_on_every_replica(self._run("weight_digests"))

    def invalidate_kv_cache(self) -> bool:
        return all(self._run("invalidate_kv_cache"))

    def _same(self, method: str, *args: Any) -> Any:
        """The answer of every replica, which must be one.

        Raises:
            WeightSyncError: the replicas differ.
        """
        answers = self._run(method, *args)
        if any(answer != answers[0] for answer in answers):
            raise WeightSyncError(
                f"The {len(answers)} generation replicas do not hold the same weights ({method} differs): a refit was torn."
            )
        return answers[0]

    def _run(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.wait_ready()
        return self.group.run_all(method, *args, deadline_s=self._deadlines.refit_s, **kwargs)


def generate_on(
    group: WorkerGroup, data: BatchedDataDict[Any], *, greedy: bool, deadline_s: float
) -> BatchedDataDict[GenerationOutputSpec]:
    """Split the rows over the ranks of `group`, sample, and put the answers back in the order of `data`."""
    rows = at_the_door(data, [key for key in ROW_KEYS if key in data or key == "input_ids" or key == "input_lengths"])
    parts = _by_prompt(rows, group.world_size)
    order = [row for part in parts for row in part]
    shards = [rows.select_indices(part) for part in parts]
    if len(shards) < group.world_size:
        calls = [group.submit_one("generate", shard, rank=rank, greedy=greedy) for rank, shard in enumerate(shards)]
        results = [call.result(deadline_s) for call in calls]
    else:
        results = group.run_each("generate", [(shard,) for shard in shards], greedy=greedy, deadline_s=deadline_s)
    output: BatchedDataDict[Any] = BatchedDataDict.from_batches(results)
    output.reorder_data(order)
    return output


def _by_prompt(rows: BatchedDataDict[Any], num_parts: int) -> list[list[int]]:
    """Row indices of at most `num_parts` non-empty parts; the rows of one prompt share a part, and so its prefill."""
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    prompts: dict[bytes, list[int]] = {}
    for row in range(rows.size):
        prompts.setdefault(ids[row, : int(lengths[row])].numpy().tobytes(), []).append(row)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for members in sorted(prompts.values(), key=len, reverse=True):
        min(parts, key=len).extend(members)
    return [part for part in parts if part]
