"""The one owner of weight synchronization: sends weights, compares versions and fingerprints, refits restarted replicas.

Waits for calls of several worker groups that depend on each other, such as the two ends of a broadcast.

Weight synchronization of a run without an engine, such as the replay of another run.

The phases of a refit: how long each takes, and who is responsible for an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rl_core.cluster.worker_group import PendingCall, poll_together
from rl_core.errors import DeadlineExceededError, WeightSyncError, WorkerDiedError, WorkerError
from rl_core.interfaces.generation import GenerationInterface, WeightOwner
from rl_core.interfaces.policy import ColocatablePolicyInterface, TransportContext, WeightTransport
from rl_core.weights.fingerprint import Kind, describe_differences
from rl_train.weight_sync.canary import Canary, CanaryCalibration, SentWeights, StreamedCanary, kind_of
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.transports import check_versions, choose_transport, free_loopback_port, push_weights

_log = logging.getLogger(__name__)

DEFAULT_BUFFER_BYTES = 512 * 2**20


class WeightSynchronizer(WeightOwner):
    """Sends a policy's weights to a generation backend and raises unless they have verifiably arrived.

    It owns the versions: nothing else starts a refit. A replica that is restarted during a rollout waits in `provide_weights`,
    which refits that replica alone; rows of other replicas continue. One refit runs at a time. An engine has one owner, the
    synchronizer that was created last.
    """

    def __init__(
        self,
        policy: ColocatablePolicyInterface,
        generation: GenerationInterface,
        *,
        transports: Sequence[type[WeightTransport]],
        policy_capabilities: Collection[str],
        generation_capabilities: Collection[str],
        transport: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        deadline_s: float = 600.0,
        folder: Path | None = None,
        prove: bool = True,
        canary: Callable[[], Canary] | None = None,
        calibration: CanaryCalibration | None = None,
        digests_are_held: bool = True,
        num_receivers: int = 1,
        wait: Callable[[Sequence[Any], float], Any] | None = None,
        rendezvous: Callable[[], tuple[str, int]] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Choose the transport; nothing is opened before the first `sync`.

        Args:
            policy: the sender.
            generation: the receiver.
            transports: known ones, the preferred first.
            policy_capabilities: capabilities of the policy backend, which include the names of its transports.
            generation_capabilities: likewise of the generation backend.
            transport: the one to use; by default the first of `transports` that both sides support.
            buffer_bytes: maximum bytes in transit at a time.
            deadline_s: timeout of one refit in seconds.
            folder: folder for weights sent by disk; the system's temporary folder by default.
            prove: compare fingerprints after each refit; versions are always compared.
            canary: creates the rows that both sides score, once both have loaded; none by default. It runs after the first
                refit and after a generation worker was restarted; in every `sync` if fingerprints are not compared or do not
                cover what the engine computes with.
            calibration: calibration of that canary, for checkpoints.
            digests_are_held: whether the engine digests the tensors that it computes with, so that fingerprints cover them.
                If it digests the weights that arrived, the canary runs in every `sync`, even if nothing is sent.
            num_receivers: number of generation workers.
            wait: waits for pending calls (`wait_together`); needed by transports that call both sides at once.
            rendezvous: address and free port on the node of the policy's rank 0; this machine's loopback by default.
            memory: the device memory that policy and engine share; by default, one that is large enough for both.

        Raises:
            MissingCapabilityError: both sides support no common transport, or not the named one.
        """
        self._policy = policy
        self._generation = generation
        self._memory = memory or DeviceMemory(policy, generation)
        generation.weight_owner = self
        self._turn = threading.RLock()
        """Held during a refit."""
        self._is_refitting = False
        self.synced_version: int | None = None
        """Weight version of the last verified refit of all replicas."""
        self.before_refit: Callable[[], None] | None = None
        """Called before a refit that changes weights, if rollouts in progress must end with those that they began with."""
        self.streamed: StreamedCanary | None = None
        """The canary as rollouts are sampled; None if they are sampled in batches or not during training."""
        self._prove = prove
        self._make_canary, self.has_canary = canary, canary is not None
        self._canary: Canary | None = None
        self._unscored: Callable[[ColocatablePolicyInterface], float] | None = None
        """Scores the canary's rows of the last refit, if the policy had to leave the device first."""
        self._canary_restarts: int | None = None
        """Restarts of the engine when the canary last ran."""
        self.calibration = calibration if calibration is not None else CanaryCalibration()
        """The canary's calibration; a run saves it with its checkpoints."""
        self._digests_cover = prove and digests_are_held
        """Whether every refit compares fingerprints of the tensors that the engine computes with."""
        self.sent = SentWeights()
        """The fingerprints of the weights that the policy has sent."""
        self._kind: Kind | None = None
        self._dtypes: Mapping[str, str] = {}
        self._beside: ThreadPoolExecutor | None = None
        self._digested: Future[str] | None = None
        chosen = choose_transport(
            transports, policy_supports=policy_capabilities, generation_supports=generation_capabilities, name=transport
        )
        self._memory.shares_weights = chosen.shares_memory
        self._transport = chosen(
            TransportContext(
                buffer_bytes=buffer_bytes,
                deadline_s=deadline_s,
                folder=folder or Path(gettempdir()),
                wait=wait or wait_for_each,
                rendezvous=rendezvous or free_loopback_port,
                num_receivers=num_receivers,
                on_sent=self._start_policy_digest,
                receiver_dtypes=lambda: self._dtypes,
            )
        )

    @property
    def transport_name(self) -> str:
        """Name of the transport."""
        return self._transport.name

    @property
    def is_stale(self) -> bool:
        """Whether the generation backend's weight version differs from the policy's."""
        return self._policy.weight_version != self._generation.weight_version

    def sync(self, *, only_if_stale: bool = False) -> dict[str, float]:
        """Send all weights and verify that they arrived; retries if a generation worker died and was restarted.

        Args:
            only_if_stale: send nothing if versions and, with `prove`, fingerprints are already equal.

        Returns:
            `refit/prepare_s`, `refit/push_s`, `refit/prove_s`, `refit/canary_s`, `refit/total_s`, `refit/paused_s` in seconds,
            `refit/bytes`, `refit/weight_version`, `refit/moved`: 1.0, or 0.0 if equal weights were not sent, and if the canary
            ran `refit/canary_error`, in nats per token.

        Raises:
            WeightSyncError: the generation backend's weights are not the policy's; names the tensors.
            WorkerDiedError: a policy worker died, or a generation worker that may not be restarted.
            DeadlineExceededError: the refit took too long.
        """
        if self.before_refit is not None and self.synced_version != self._policy.weight_version:
            self.before_refit()
        with self._turn:
            while True:
                metrics = self._attempt(self._generation, only_if_stale)
                if metrics is not None:
                    self.synced_version = self._policy.weight_version
                    return metrics

    def request_canary(self) -> None:
        """Run the canary in the next `sync`, whatever it transfers."""
        self._canary_restarts = None

    def check_canary(self) -> float:
        """Run the canary with many rows now, between rollouts and training; returns its error in nats per token.

        Raises:
            WeightSyncError: the canary failed.
        """
        assert self._make_canary is not None
        with self._turn:
            if self.is_stale:  # an engine that discards its weights when it sleeps
                self.sync()
            self._memory.free_for_engine()
            self._unscored = None
            with attributed(self.transport_name):
                self._canary = self._canary or self._make_canary()
                if self.streamed is not None:
                    score = self.streamed.sample(self._canary, self._generation)
                else:
                    score = self._canary.sample(self._generation, thorough=True)
                self._memory.free_for_model(self._policy)
                return score(self._policy)

    def score_canary(self) -> dict[str, float]:
        """Score the canary's rows that the policy could not score in the last `sync`; call it before an optimizer step.

        Returns:
            `refit/canary_error`, in nats per token; nothing if there are no such rows.

        Raises:
            WeightSyncError: the canary failed.
        """
        score, self._unscored = self._unscored, None
        if score is None:
            return {}
        with attributed(self.transport_name):
            return {"refit/canary_error": score(self._policy)}

    def check_sent(self) -> None:
        """Check that the policy sends other weights than before its last optimizer steps; `sync` does it where weights move.

        Raises:
            BrokenPromiseError: it sends the same.
        """
        if self._kind is not None:
            fingerprint = self._policy.weight_fingerprint(dtypes=self._dtypes, kind=self._kind)
            exact = set(self._dtypes.values()) <= {"float32"}
            self.sent.check(fingerprint, version=self._policy.weight_version, exact=exact)

    def provide_weights(self) -> None:
        """Give restarted replicas their weights; refits the whole engine if the policy has changed since the last `sync`."""
        with self._turn:  # waits for a refit of another thread
            while (replicas := self._restarted_replicas()) is not None:
                if self._is_refitting:
                    raise WeightSyncError("A generation worker died during a refit; the refit must be repeated.")
                version = self._policy.weight_version
                engine = replicas if version == self.synced_version else self._generation
                metrics = self._attempt(engine, only_if_stale=False)
                if metrics is not None and engine is self._generation:
                    self.synced_version = version
                if metrics is not None:
                    _log.info(
                        "restarted generation workers have weight version %d, in %.1f s", version, metrics["refit/total_s"]
                    )

    def _restarted_replicas(self) -> GenerationInterface | None:
        while True:
            before = self._generation.restarts
            try:
                return self._generation.restarted_replicas()
            except WorkerDiedError as error:
                self._restart_or_raise(error, before)

    def _attempt(self, engine: GenerationInterface, only_if_stale: bool) -> dict[str, float] | None:
        """Refit an engine and verify it; None if a generation worker died and was restarted, so that it must be repeated."""
        before = self._generation.restarts
        self._is_refitting = True
        try:
            return self._sync_once(engine, only_if_stale)
        except (WorkerError, WeightSyncError) as error:
            if engine is self._generation:
                self.synced_version = None  # replicas may have some of the new weights
            # A death explains a broken broadcast, whichever was noticed first.
            self._restart_or_raise(error, before)
            _log.warning("a generation worker died in the refit by %s; the refit is repeated", self.transport_name)
            return None
        finally:
            self._is_refitting = False

    def _restart_or_raise(self, error: Exception, before: int) -> None:
        if self._memory.limited:
            self._memory.free_for_engine()  # a new worker of an engine needs its whole share of free memory
        self._generation.restart_dead(error)
        if self._generation.restarts == before:
            raise error

    def _sync_once(self, engine: GenerationInterface, only_if_stale: bool) -> dict[str, float]:
        started = time.perf_counter()
        seconds = {"prepare_s": 0.0, "push_s": 0.0, "prove_s": 0.0, "canary_s": 0.0, "paused_s": 0.0}
        if only_if_stale and self._memory.is_with_engine and not self.is_stale:
            return self._metrics(seconds, started, moved=0, happened=False)
        self._memory.free_for_refit(engine)
        canary_metrics, moved = self.score_canary(), 0
        with self._streaming(engine) as end_stream:
            try:
                is_equal = only_if_stale and not self.is_stale and self._already_equal(seconds)
                with attributed(self.transport_name):
                    if not is_equal:
                        moved = self._refit(engine, seconds)
            finally:
                self._policy.finish_refit()
            self._memory.free_for_engine()
            with attributed(self.transport_name):
                if not is_equal:
                    self._empty_cache(engine, seconds)
                if not (is_equal and self._digests_cover):
                    with timed(seconds, "canary_s"):
                        canary_metrics |= self._run_canary(engine) | end_stream()
        return self._metrics(seconds, started, moved=moved, happened=not is_equal) | canary_metrics

    def close(self) -> None:
        """Leave process groups, free buffers and release the engine; calling it twice is fine."""
        if self._generation.weight_owner is self:
            self._generation.weight_owner = None
        self._transport.close()

    def _refit(self, engine: GenerationInterface, seconds: dict[str, float]) -> int:
        with timed(seconds, "prepare_s"):
            manifest = self._policy.prepare_refit_info() or {}
            seconds["paused_s"], dtypes = -time.perf_counter(), engine.prepare_refit_info(manifest)
            self._dtypes = dtypes or {name: dtype for name, (_, dtype) in manifest.items()}
        self._digested = None
        with timed(seconds, "push_s"), ThreadPoolExecutor(1, "rlcore-digest") as self._beside:
            moved = push_weights(self._transport, self._policy, engine)
        with timed(seconds, "prove_s"):
            check_versions(self._transport, self._policy, engine)
            # Memory that is shared was compared once; the engine checks in each refit that it is still the policy's.
            if self._prove and not (self._transport.shares_memory and self.synced_version is not None):
                self._prove_fingerprint(engine)
        return moved

    def _empty_cache(self, engine: GenerationInterface, seconds: dict[str, float]) -> None:
        with timed(seconds, "prove_s"):
            if not engine.invalidate_kv_cache():
                raise WeightSyncError(
                    "The generation backend could not empty its prefix cache after the refit, so it would continue from keys "
                    "and values of older weights. Let its running requests finish, or abort them, before a refit."
                )
        seconds["paused_s"] += time.perf_counter()

    def _run_canary(self, engine: GenerationInterface) -> dict[str, float]:
        """Run the canary unless fingerprints cover what the engine computes with and its workers have passed it before."""
        if self._make_canary is None or (self._digests_cover and self._canary_restarts == self._generation.restarts):
            return {}
        is_first = self._canary is None
        self._canary = self._canary or self._make_canary()
        if self._memory.limited:
            self._unscored = self._canary.sample(engine, thorough=is_first)
            self._canary_restarts = self._generation.restarts
            return {}
        error = self._canary.check(self._policy, engine, thorough=is_first)
        self._memory.free_for_engine()
        self._canary_restarts = self._generation.restarts
        return {"refit/canary_error": error}

    def _streaming(self, engine: GenerationInterface) -> AbstractContextManager[Callable[[], dict[str, float]]]:
        moves = engine is self._generation and self.synced_version not in (None, self._policy.weight_version)
        if self.streamed is None or self._canary is None or not moves:
            return nullcontext(dict)
        if engine.restarted_replicas() is not None:  # rows would wait for weights that only this refit brings
            return nullcontext(dict)
        return self.streamed.over_refit(self._canary, self._policy, engine)

    def _start_policy_digest(self) -> None:
        """Compute the policy's fingerprint, in the kind of the previous refit, while the engine loads the sent weights."""
        if self._prove and self._kind is not None and self._beside is not None:
            self._digested = self._beside.submit(self._policy.weight_fingerprint, dtypes=self._dtypes, kind=self._kind)

    def _prove_fingerprint(self, engine: GenerationInterface) -> None:
        arrived, dtypes = engine.weight_fingerprint(), self._dtypes
        kind = kind_of(arrived)
        digested = self._digested.result() if self._digested is not None and kind == self._kind else None
        self._kind = kind
        if (digested or self._policy.weight_fingerprint(dtypes=dtypes, kind=kind)) == arrived:
            self.sent.check(arrived, version=self._policy.weight_version, exact=set(dtypes.values()) <= {"float32"})
            return
        lines = describe_differences(self._policy.weight_digests(dtypes=dtypes, kind=kind), engine.weight_digests())
        raise WeightSyncError(
            f"The generation backend's weights differ from the policy's at version {self._policy.weight_version}:\n"
            + "\n".join(f"  {line}" for line in lines)
            + f"\nThey were sent by {self.transport_name}. The run stops, because its samples would not be the policy's."
        )

    def _already_equal(self, seconds: dict[str, float]) -> bool:
        if not self._prove:
            return True
        with timed(seconds, "prove_s"), attributed(self.transport_name):
            manifest = self._policy.prepare_refit_info() or {}
            engine = self._generation.weight_digests()
            kind = kind_of(self._generation.weight_fingerprint())
            dtypes = {name: digest.partition("[")[0] for name, digest in engine.items() if name in manifest}
            return self._policy.weight_digests(dtypes=dtypes, kind=kind) == engine

    def _metrics(self, seconds: Mapping[str, float], started: float, *, moved: int, happened: bool) -> dict[str, float]:
        return {
            **{f"refit/{part}": spent for part, spent in seconds.items()},
            "refit/total_s": time.perf_counter() - started,
            "refit/bytes": float(moved),
            "refit/weight_version": float(self._policy.weight_version),
            "refit/moved": float(happened),
        }


def wait_together(pending: Sequence[PendingCall], deadline_s: float) -> list[Any]:
    """The results of calls of several groups that depend on each other, such as the two ends of a broadcast.

    Awaiting them one after the other would wait for the first one's deadline even if the second has already failed.

    Raises:
        WorkerError: The first failure, immediately; or a death that is noticed soon after, since it explains the others.
        DeadlineExceededError: Names all workers that did not answer, of every group.
    """
    until = time.monotonic() + deadline_s
    while not poll_together(pending, max(until - time.monotonic(), 0.0)):
        reports = [text for call in pending if time.monotonic() >= until and (text := _expired(call)) is not None]
        if reports:
            raise DeadlineExceededError(f"after {deadline_s:g} s together:\n" + "\n".join(reports))
    return [call.result() for call in pending]


def _expired(call: PendingCall) -> str | None:
    try:
        call.result(deadline_s=0.0)
    except DeadlineExceededError as error:
        return str(error)
    return None


def wait_for_each(pending: Sequence[Any], deadline_s: float) -> None:
    """Wait for `concurrent.futures` futures, if no worker group provides pending calls."""
    end = time.monotonic() + deadline_s
    for call in pending:
        call.result(timeout=max(end - time.monotonic(), 0.0))


class NoEngine:
    """Sends nothing; algorithms call `sync` as if there were an engine."""

    def sync(self, *, only_if_stale: bool = False) -> dict[str, float]:
        """Does nothing.

        Returns:
            No metrics.
        """
        return {}


@contextmanager
def attributed(transport: str) -> Iterator[None]:
    """Report rejected weights as a failed refit; a worker's death or an expired deadline keeps its own error."""
    try:
        yield
    except WorkerDiedError:
        raise
    except WorkerError as error:
        raise WeightSyncError(f"The refit by {transport} failed in a worker, so weights are unverified.\n{error}") from error


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the duration of the block to `seconds[phase]`, unless it raises."""
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started
