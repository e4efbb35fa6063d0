"""A generation engine over the replicas of a worker group: rows of a prompt share a replica; a dead one's are reassigned."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_backends_base.replica_rows import Answer, RestartedReplicas, in_row_order, newest_version, prompt_columns, sample_rows
from rl_backends_base.streaming import RowStream
from rl_core.cluster.worker_group import WorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, PromptReader
from rl_core.dispatch.facades import GenerationFacade
from rl_core.dispatch.rows import check_rows
from rl_core.dispatch.text_generation import TextGeneration
from rl_core.errors import WeightSyncError, WorkerDiedError, WorkerError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_core.interfaces.worker import GenerationWorker

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
"""Interval in which a thread that waits for another one's refit checks whether it has ended."""


class DistributedGeneration(GenerationFacade, TextGeneration):
    """A group of `GenerationWorker`s as one engine.

    A replica that dies is restarted, up to `config.max_restarts` times in total. It then waits until the owner of weight
    synchronization (`weight_owner`) has sent and verified the policy's weights, and samples the rows that it had not finished.
    Rows of other replicas continue meanwhile. An engine that was never refitted continues with its initial weights. The refit
    methods raise WorkerDiedError: the owner calls `restart_dead` and repeats the refit. A replica that dies before it has
    first loaded is an error.

    Arguments as `WorkerFacade`; `config` is the section `policy.generation`, and a worker is a replica.
    """

    _was_refitted = False
    _is_prepared = False

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data`, all with the same weight version; see `GenerationInterface`.

        Raises:
            DataError: a row cannot be completed; raised before any replica starts.
            WorkerDiedError: a replica died and its restarts are used up.
            WeightSyncError: a restarted replica could not be refitted, or the engine has no `weight_owner`.
        """
        if (output := self._generate_messages(data, greedy)) is not None:
            return output
        self._check_rows(data)
        rows = prompt_columns(data)
        answers: list[Answer] = []
        missing = list(range(rows.size))
        while missing:
            self.await_weights()
            sampled, deaths = sample_rows(self.group, rows, missing, greedy=greedy, deadline_s=self._deadlines.generate_s)
            for part, output in sampled:
                check_rows(output, "weight_version", len(part))
            answers = newest_version([*answers, *sampled])
            missing = sorted(set(range(rows.size)).difference(*(part for part, _ in answers)))
            if deaths:
                self.restart_dead(deaths[0])
                _log.warning("%d of %d rows of the generation call are sampled again", len(missing), rows.size)
        return in_row_order(answers)

    def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield each row when it ends; the rows of concurrent calls are sampled together.

        Rows in progress on a replica that dies are sampled again from their start, once it is restarted and refitted.

        Raises:
            NotSupportedError: the worker has no `poll`.
            DataError: a row cannot be completed; raised before any replica starts.
            WorkerDiedError: a replica with rows of this call died and its restarts are used up. Later calls use the others.
            WeightSyncError: it was restarted and could not be refitted, or the engine has no `weight_owner`.
        """
        if not self.streams_rows:
            raise self._not_supported("generate_async")
        self._check_rows(data)
        return self._stream.rows(prompt_columns(data), greedy=greedy)

    def batch_progress(self) -> tuple[int, int] | None:
        return self.group.batch_progress() if self._overrides("batch_progress") else None

    def close_sessions(self, sessions: Sequence[str]) -> None:
        self._stream.close_sessions(sessions, notify_replicas=self._overrides("close_sessions"))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run_with_restarts("prepare_for_generation")
        self._is_prepared = True
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run_with_restarts("finish_generation")
        self._is_prepared = False
        return True

    @property
    def restarts(self) -> int:
        with self._restarting:  # a restart that another thread has begun counts once its worker is set up
            return self._restarter.count

    def restarts_of(self, rank: int) -> int:
        return self._restarter.restarted[rank]

    def restart_dead(self, cause: Exception | None = None) -> bool:
        if self._closed:
            return False
        with self._restarting:
            dead = set(self._restarter.dead())
            self._without_weights |= dead  # before other threads can call the new workers
            try:
                replaced = self._restarter.restart_dead(self.wait_ready(), cause)
                self._without_weights |= replaced
            finally:
                if not self._was_refitted:
                    self._without_weights.clear()
                elif self._restarter.dead():
                    self._without_weights -= dead
        if replaced and not self._was_refitted:
            _log.warning("the new generation workers have the initial weights, like the others: there was no refit yet")
        return bool(replaced)

    def restarted_replicas(self) -> RestartedReplicas | None:
        ranks = sorted(self._without_weights)
        versions = self._run_on(ranks, "get_weight_version") if ranks else []
        waiting = [rank for rank, version in zip(ranks, versions, strict=True) if version < 0]
        if not waiting:
            return None
        return RestartedReplicas(
            self.group,
            waiting,
            processes=self.num_workers // self.group.world_size,
            restarts=self.restarts,
            deadlines=self._deadlines,
        )

    def lacks_weights(self, rank: int) -> bool:
        return rank in self._without_weights

    def recover(self, rank: int, cause: WorkerDiedError, restarts_before: int) -> None:
        """Restart a dead replica, unless that happened since, and wait for its weights; may be called in any thread.

        Args:
            rank: the replica.
            cause: its error.
            restarts_before: `restarts_of(rank)` when the failed call started.

        Raises:
            WorkerDiedError: no restart explains the error, or the restarts are used up.
            WeightSyncError: see `await_weights`.
        """
        with self._restarting:
            if self.restarts_of(rank) == restarts_before and not self.restart_dead(cause):
                raise cause
        self.await_weights()

    def await_weights(self) -> None:
        """Wait until all restarted replicas have the policy's weights; may be called in any thread.

        Raises:
            WeightSyncError: the refit failed, there is no owner of weight synchronization, or it is the caller.
            WorkerDiedError: a replica died and its restarts are used up.
        """
        is_other_thread = self.refit_thread not in (None, threading.get_ident())
        while is_other_thread and self._without_weights and not self._closed:
            time.sleep(_LOOK_S)
        while not is_other_thread:
            with self._restarting:  # waits for a restart of another thread
                ranks, before = sorted(self._without_weights), self.restarts
            if not ranks:
                return
            try:
                if self.weight_owner is not None:
                    self.weight_owner.provide_weights()
                version = min(self._run_on(ranks, "get_weight_version"))
                if version >= 0 and self._is_prepared:
                    self._run_on(ranks, "prepare_for_generation")
            except WorkerDiedError as error:
                if self.restarts == before and not self.restart_dead(error):
                    raise
                continue
            with self._restarting:
                if self.restarts != before:
                    continue
                if version < 0:
                    raise self._no_weights(ranks)
                self._without_weights.difference_update(ranks)

    @property
    def streams_rows(self) -> bool:
        return self._overrides("poll")

    @property
    def streams_tokens(self) -> bool:
        return self.streams_rows and bool(self.facts.get("streams_tokens"))

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        self._was_refitted = True
        return super().prepare_refit_info(info)

    def _make_group(self, cluster: RayVirtualCluster | None) -> WorkerGroup:
        """Start the workers, and what restarts and streams them."""
        group = super()._make_group(cluster)
        self._without_weights: set[int] = set()
        """Replicas that were restarted since the last refit and must not sample."""
        self._restarting = threading.RLock()
        """Held while workers are restarted and while `_without_weights` changes; never while weights are awaited."""
        self._restarter = WorkerRestarter(
            group, max_restarts=self.config.max_restarts, key="policy.generation.max_restarts", start_s=self._deadlines.start_s
        )
        self._stream = RowStream(group, deadline_s=self._deadlines.generate_s, recovery=self)
        return group

    def _overrides(self, method: str) -> bool:
        """Whether the worker implements an optional method."""
        default = getattr(GenerationWorker, method)
        return getattr(self.worker_class, method, default) is not default

    def _check_rows(self, data: BatchedDataDict[GenerationDatumSpec]) -> None:
        """Check rows before dispatch, so that errors name the caller's row; a worker without these facts checks its own."""
        facts = self.facts
        if not {"vocab_size", "max_model_len"} <= facts.keys():
            return
        limits = LengthLimits(
            vocab_size=facts["vocab_size"], max_model_len=facts["max_model_len"], max_new_tokens=self.config.max_new_tokens
        )
        PromptReader(
            limits,
            stop_strings=self.config.stop_strings or (),
            reads_text=facts.get("reads_text", True),
            reads_sampling=facts.get("reads_sampling", False),
            row_options=facts.get("row_options", ()),
            reads_images=facts.get("images", False),
        ).read(data)

    def _no_weights(self, ranks: Sequence[int]) -> WeightSyncError:
        replicas = f"Generation replica {', '.join(map(str, ranks))} was restarted with the model's initial weights"
        if self.weight_owner is not None:
            return WeightSyncError(
                f"{replicas}, and still has them although {type(self.weight_owner).__name__}.provide_weights returned. It must "
                "send and verify the policy's weights before it returns."
            )
        return WeightSyncError(
            f"{replicas}. The engine had been refitted, so the replica would sample with a different model. Refit the engine "
            "and call generate again, or set `generation.weight_owner`; creating a `WeightSynchronizer` does that."
        )

    def _run_with_restarts(self, method: str) -> list[Any]:
        """Call every replica; if dead ones were restarted, call all again."""
        while True:
            try:
                return self._run(method)
            except WorkerDiedError as error:
                if not self.restart_dead(error):
                    raise

    def _run_on(self, ranks: Sequence[int], method: str) -> list[Any]:
        calls = self.group.submit_some(method, dict.fromkeys(ranks, ()), deadline_s=self._deadlines.refit_s)
        return list(calls.result())


class WorkerRestarter:
    """Restarts the workers of one group.

    Args:
        group: the workers.
        max_restarts: maximum number of restarts over the group's life.
        key: the config key of that number, for errors.
        start_s: timeout of the new workers' `setup`.
    """

    def __init__(self, group: WorkerGroup, *, max_restarts: int, key: str, start_s: float) -> None:
        self._group = group
        self._max_restarts = max_restarts
        self._key = key
        self._start_s = start_s
        self.count = 0
        """Workers replaced so far."""
        self.restarted: Counter[int] = Counter()
        """By rank: number of replacements that have started."""

    def restart_dead(self, facts: Sequence[Mapping[str, Any]], cause: Exception | None = None) -> set[int]:
        """Restart all dead workers and set them up.

        A worker that dies again during its start counts as another restart.

        Args:
            facts: what each rank's first `setup` reported.
            cause: the error that led to this call.

        Returns:
            The ranks of the new workers, which have none of the old ones' state.

        Raises:
            WorkerDiedError: the limit does not allow another restart, or a worker of another group died; names them.
            WorkerError: a new worker cannot load, or reports facts that differ from its predecessor's.
            DeadlineExceededError: the restart took longer than `start_s`.
        """
        replaced, waiting = set[int](), set[int]()
        while (dead := self.dead()) or waiting:
            waiting.update(dead)
            self._group.check_others()
            self._count(dead, cause)
            try:
                for rank in dead:
                    self._group.restart(rank)
                    self.restarted[rank] += 1
            except WorkerDiedError as error:
                cause = error
                continue
            ranks = sorted(waiting)
            answers = self._group.submit_some("setup", dict.fromkeys(ranks, ())).settle(self._start_s)
            for rank, answer in zip(ranks, answers, strict=True):
                if isinstance(answer, WorkerDiedError):
                    cause = answer
                    continue
                self._reject_another(rank, facts[rank], answer)
                waiting.remove(rank)
                replaced.add(rank)
        return replaced

    def dead(self) -> list[int]:
        """The ranks whose workers have exited."""
        return [rank for rank, alive in enumerate(self._group.workers_alive()) if not alive]

    def _count(self, dead: Sequence[int], cause: Exception | None) -> None:
        names = [self._group.describe_rank(rank) for rank in dead]
        if self.count + len(dead) > self._max_restarts:
            raise WorkerDiedError(
                f"{'; '.join(names)} exited and `{self._key}` ({self._max_restarts}) does not allow another restart; "
                f"{self.count} workers of this group were already restarted. Check their logs and the memory of their hosts. "
                f"Then resume from the last checkpoint, or raise `{self._key}`." + (f"\n{cause}" if cause is not None else "")
            )
        why = f": {str(cause).splitlines()[0]}" if cause is not None and str(cause) else ""
        for name in names:
            self.count += 1
            _log.warning("%s exited; restarting it (%d of %d)%s", name, self.count, self._max_restarts, why)

    def _reject_another(self, rank: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = {
            key: (before.get(key), now.get(key)) for key in before.keys() | now.keys() if before.get(key) != now.get(key)
        }
        if changed:
            said = "; ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in sorted(changed.items()))
            raise WorkerError(
                f"{self._group.describe_rank(rank)}, which replaced a worker that exited, loaded something else: {said}. The "
                "files or the machine changed during the run. Restore them and resume from the last checkpoint."
            )
