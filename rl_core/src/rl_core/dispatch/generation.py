"""A generation engine over the replicas of a worker group: rows of a prompt share a replica; a dead one's are reassigned."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.config.schema import DeadlineConfig, GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, read_prompts, refuse_text
from rl_core.dispatch.affinity import prompt_keys, split_by_prompt
from rl_core.dispatch.rows import select_columns
from rl_core.dispatch.streaming import RowStream
from rl_core.dispatch.text import TextGeneration
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.dispatch.worker_restarts import WorkerRestarter
from rl_core.errors import WeightSyncError, WorkerDiedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from rl_core.interfaces.worker import GenerationWorker
from rl_core.weights.replicas import same_digests_on_every_replica

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

_log = logging.getLogger(__name__)

ROW_KEYS = (
    *("input_ids", "input_lengths", "stop_strings", "sample_seeds", "max_new_tokens", "session_ids", "prompt_id", "sampling"),
)


class DistributedGeneration(WorkerFacade, TextGeneration, GenerationInterface):
    """A group of `GenerationWorker`s as one engine.

    A replica that dies is restarted, up to `config.max_restarts` times in total. `generate` then sends the policy's weights
    to all replicas again (`refit_with`) and samples only the missing rows. An engine that was never refitted continues with
    its initial weights. The refit methods raise WorkerDiedError: the caller calls `restart_dead` and starts the refit again. A
    replica that dies before it has first loaded is an error.

    Args:
        worker_class: the backend's worker.
        config: the section `policy.generation`, passed to each worker.
        cluster: where the replicas run; without one, a single replica runs in this process.
        num_workers: number of replicas; as many as fit on the cluster by default.
        deadlines: timeouts by kind of call.
        env_vars: additional environment variables of the workers.
        bundles_per_worker: number of cluster bundles per replica.
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
        bundles_per_worker: int = 1,
    ) -> None:
        super().__init__(
            worker_class=worker_class,
            config=config,
            name="generation",
            cluster=cluster,
            num_workers=num_workers or config.num_workers,
            deadlines=deadlines,
            env_vars=env_vars,
            bundles_per_worker=bundles_per_worker,
        )
        self._can_poll = _overrides(worker_class, "poll")
        self._keeps_sessions = _overrides(worker_class, "close_sessions")
        self._attach()
        self._refit: Callable[[], object] | None = None
        self._was_refitted = False
        self._without_weights: set[int] = set()
        self._is_prepared = False

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See `GenerationInterface`; all returned rows are sampled with the same weight version.

        Raises:
            DataError: a row cannot be completed; raised before any replica starts.
            WorkerDiedError: a replica died and its restarts are used up.
            WeightSyncError: a replica was restarted and `refit_with` was not called.
        """
        self._check_rows(data)
        rows = _prompt_columns(data)
        answers: list[_Answer] = []
        missing = list(range(rows.size))
        while missing:
            while self._without_weights:
                self._bring_weights()
            found, deaths = _sample_rows(self.group, rows, missing, greedy=greedy, deadline_s=self._deadlines.generate_s)
            answers = _of_one_version([*answers, *found])
            missing = sorted(set(range(rows.size)).difference(*(part for part, _ in answers)))
            if deaths:
                self.restart_dead(deaths[0])
                _log.warning("%d of %d rows of the generation call are sampled again", len(missing), rows.size)
        return _in_order(answers)

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See `GenerationInterface`; the rows of concurrent calls are sampled together.

        If a replica dies, its calls fail, and the first of them restarts the replica, which blocks the event loop until it has
        loaded; it streams again once it has the policy's weights.

        Raises:
            NotSupportedError: the worker has no `poll`.
            DataError: a row cannot be completed; raised before any replica starts.
            WorkerDiedError: a replica with rows of this call died; the call may be repeated if `restarts` has increased.
        """
        if not self.streams_rows:
            raise self._not_supported("generate_async")
        self._check_rows(data)
        if self._without_weights:
            self._bring_weights()
        restarts = self.restarts
        try:
            async for row, output in self._stream.rows(_prompt_columns(data), greedy=greedy):
                yield row, output
        except WorkerDiedError as error:
            # A dead replica has no rows in progress, so it would get all new ones: replace it now.
            if self.restarts == restarts:
                self.restart_dead(error)
            raise

    def close_sessions(self, sessions: Sequence[str]) -> None:
        self._stream.close_sessions(sessions, tell_replicas=self._keeps_sessions)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run_revived("prepare_for_generation")
        self._is_prepared = True
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run_revived("finish_generation")
        self._is_prepared = False
        return True

    def spread_over(self, cluster: RayVirtualCluster) -> None:
        super().spread_over(cluster)
        self._attach()

    @property
    def restarts(self) -> int:
        return self._revival.count

    def refit_with(self, refit: Callable[[], object]) -> None:
        self._refit = refit

    def restart_dead(self, cause: Exception | None = None) -> bool:
        if self._closed:
            return False
        replaced = self._revival.restart_dead(self.wait_ready(), cause)
        if self._was_refitted:
            self._without_weights |= replaced
        elif replaced:
            _log.warning("the new generation workers have the initial weights, like the others: there was no refit yet")
        return bool(replaced)

    @property
    def has_own_weights(self) -> bool:
        own: bool = self.config.has_own_weights
        return own

    @property
    def streams_rows(self) -> bool:
        return self._can_poll

    @property
    def num_workers(self) -> int:
        return self.group.world_size

    @property
    def weight_version(self) -> int:
        """See `GenerationInterface`; -1 if a replica was restarted and not refitted since.

        Raises:
            WeightSyncError: the replicas have different versions.
        """
        return self._version_of(self._run("get_weight_version"))

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        self.wait_ready()
        return [self.group.submit_all("init_collective", ip, port, world_size)]

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        self._was_refitted = True
        dtypes: Mapping[str, str] = _one_of(self._run("prepare_refit_info", info), "prepare_refit_info")
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

    def _attach(self) -> None:
        """Restart and stream the workers of the current group."""
        self._revival = WorkerRestarter(
            self.group,
            max_restarts=self.config.max_restarts,
            key="policy.generation.max_restarts",
            start_s=self._deadlines.start_s,
        )
        self._stream = RowStream(self.group, deadline_s=self._deadlines.generate_s)

    def _check_rows(self, data: BatchedDataDict[GenerationDatumSpec]) -> None:
        """Check rows before dispatch, so that errors name the caller's row; a worker without these facts checks its own."""
        facts = self.facts
        if not {"vocab_size", "max_model_len"} <= facts.keys():
            return
        limits = LengthLimits(
            vocab_size=facts["vocab_size"], max_model_len=facts["max_model_len"], max_new_tokens=self.config.max_new_tokens
        )
        read_prompts(
            data,
            limits,
            stop_strings=self.config.stop_strings or (),
            reads_text=facts.get("reads_text", True),
            reads_sampling=facts.get("reads_sampling", False),
        )

    def _bring_weights(self) -> None:
        """Refit all replicas, unless that has already been done."""
        if self._version_of(self._run_revived("get_weight_version")) >= 0:
            return
        if self._refit is None:
            ranks = ", ".join(map(str, sorted(self._without_weights)))
            raise WeightSyncError(
                f"Generation replica {ranks} died and was restarted with the model's initial weights. The engine had been "
                "refitted, so the replica would sample with a different model. Refit the engine and call generate again, or "
                "call `generation.refit_with(synchronizer.sync)` once, so that generate does it automatically."
            )
        before = self.restarts
        self._refit()
        if self._is_prepared:
            self._run_revived("prepare_for_generation")
        if self._version_of(self._run_revived("get_weight_version")) < 0 and self.restarts == before:
            raise WeightSyncError(
                "The function passed to `refit_with` returned, but a restarted generation replica still has no weights. "
                "Pass one that sends all weights to every replica, such as `WeightSynchronizer.sync`."
            )

    def _version_of(self, versions: Sequence[int]) -> int:
        if any(versions[rank] < 0 for rank in self._without_weights):
            return -1
        version: int = _one_of(versions, "get_weight_version")
        self._without_weights.clear()
        return version

    def _run_revived(self, method: str) -> list[Any]:
        """Call every replica; if dead ones were restarted, call all again."""
        while True:
            try:
                return self._run(method)
            except WorkerDiedError as error:
                if not self.restart_dead(error):
                    raise

    def _run(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.wait_ready()
        return self.group.run_all(method, *args, deadline_s=self._deadlines.refit_s, **kwargs)


def _overrides(worker_class: type, method: str) -> bool:
    default = getattr(GenerationWorker, method)
    return getattr(worker_class, method, default) is not default


def generate_on(
    group: WorkerGroup, data: BatchedDataDict[Any], *, greedy: bool, deadline_s: float
) -> BatchedDataDict[GenerationOutputSpec]:
    """Split the rows over the ranks of `group`, sample, and return the outputs in the order of `data`.

    Raises:
        WorkerDiedError: a rank died.
    """
    rows = _prompt_columns(data)
    answers, deaths = _sample_rows(group, rows, list(range(rows.size)), greedy=greedy, deadline_s=deadline_s)
    if deaths:
        raise deaths[0]
    return _in_order(answers)


_Answer = tuple[list[int], BatchedDataDict[Any]]
"""Row indices, and one replica's output for them."""


def _prompt_columns(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    refuse_text(data)
    return select_columns(data, [key for key in ROW_KEYS if key in data or key == "input_ids" or key == "input_lengths"])


def _sample_rows(
    group: WorkerGroup, rows: BatchedDataDict[Any], wanted: list[int], *, greedy: bool, deadline_s: float
) -> tuple[list[_Answer], list[WorkerDiedError]]:
    """The outputs of the `wanted` rows, spread over all ranks, and the deaths of ranks without output."""
    prompts = prompt_keys(rows.select_indices(wanted))
    parts = [[wanted[row] for row in part] for part in split_by_prompt(prompts, group.world_size)]
    shards = {rank: (rows.select_indices(part),) for rank, part in enumerate(parts)}
    outcomes = group.submit_some("generate", shards, greedy=greedy).settle(deadline_s)
    deaths = [outcome for outcome in outcomes if isinstance(outcome, WorkerDiedError)]
    answers = [(part, o) for part, o in zip(parts, outcomes, strict=True) if not isinstance(o, WorkerDiedError)]
    return answers, deaths


def _of_one_version(answers: Sequence[_Answer]) -> list[_Answer]:
    """The answers sampled with the newest weights: the policy may have been updated between a death and the next refit."""
    newest = max((int(output["weight_version"].max()) for _, output in answers), default=-1)
    kept = [answer for answer in answers if bool((answer[1]["weight_version"] == newest).all())]
    if len(kept) < len(answers):
        _log.warning("answers sampled before weight version %d are dropped: the rows of a call must have one version", newest)
    return kept


def _in_order(answers: Sequence[_Answer]) -> BatchedDataDict[GenerationOutputSpec]:
    output: BatchedDataDict[Any] = BatchedDataDict.from_batches([answer for _, answer in answers])
    output.reorder_data([row for part, _ in answers for row in part])
    return output


def _one_of(answers: Sequence[Any], method: str) -> Any:
    """The answer of all replicas, which must be equal.

    Raises:
        WeightSyncError: the replicas differ.
    """
    if any(answer != answers[0] for answer in answers):
        raise WeightSyncError(
            f"The {len(answers)} generation replicas do not have the same weights ({method} differs): a refit was incomplete."
        )
    return answers[0]
