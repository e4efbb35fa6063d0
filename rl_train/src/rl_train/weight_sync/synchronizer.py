"""Weight synchronization: when a refit is due, its protocol, and its repetition after the restart of a generation worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl_core.cluster.worker_group import PendingCall, poll_together
from rl_core.errors import DeadlineExceededError, WeightSyncError, WorkerDiedError, WorkerError, declined_transport
from rl_core.interfaces.generation import GenerationInterface, WeightOwner
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_train.weight_sync.canary import RefitCanary
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.sender import WeightSender, attributed, timed

_log = logging.getLogger(__name__)


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
        sender: WeightSender,
        *,
        memory: DeviceMemory | None = None,
        canary: RefitCanary | None = None,
    ) -> None:
        """Become the owner of the engine's weights; nothing is opened before the first `sync`.

        Args:
            policy: the sender.
            generation: the receiver.
            sender: sends the weights and compares them.
            memory: the device memory that policy and engine share; by default, one that is large enough for both.
            canary: compares how both sides compute; none by default.
        """
        self._policy = policy
        self._generation = generation
        self._memory = memory or DeviceMemory(policy, generation)
        self._memory.shares_weights = sender.transport.shares_memory
        self.sender, self.canary = sender, canary
        generation.weight_owner = self
        self._turn = threading.RLock()
        """Held during a refit."""
        self._is_refitting = False
        self._first_version: int | None = None
        self.synced_version: int | None = None
        """Weight version of the last verified refit of all replicas."""
        self.before_refit: Callable[[], None] | None = None
        """Called before a refit that changes weights, if rollouts in progress must end with those that they began with."""

    @property
    def transport_name(self) -> str:
        """Name of the transport."""
        return self.sender.transport.name

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
            NotSupportedError: the engine declines all transports.
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

    def _refit(self, engine: GenerationInterface, only_if_stale: bool) -> dict[str, float]:
        """The protocol: free the memory, send and verify the weights, discard what the engine has cached, run the canary."""
        started = time.perf_counter()
        seconds = dict.fromkeys(("prepare_s", "push_s", "prove_s", "canary_s", "paused_s"), 0.0)
        if only_if_stale and self._memory.is_with_engine and not self.is_stale:
            return self._metrics(seconds, started, moved=0, happened=False)
        self._memory.free_for_refit(engine)
        canary_metrics, moved = self.score_canary(), 0
        with self._streaming(engine) as end_stream:
            try:
                with attributed(self.transport_name):
                    is_equal = only_if_stale and not self.is_stale and self.sender.already_equal(engine, seconds)
                    if not is_equal:
                        moved = self.sender.send(engine, seconds, is_first=self.synced_version is None)
            finally:
                self._policy.finish_refit()
            self._memory.free_for_engine()
            with attributed(self.transport_name):
                if not is_equal:
                    self._empty_cache(engine, seconds)
                if not (is_equal and self.sender.covers_engine):
                    with timed(seconds, "canary_s"):
                        canary_metrics |= self._run_canary(engine) | end_stream()
        return self._metrics(seconds, started, moved=moved, happened=not is_equal) | canary_metrics

    def _attempt(self, engine: GenerationInterface, only_if_stale: bool) -> dict[str, float] | None:
        """Refit an engine and verify it; None if it must be repeated: a worker was restarted, or the transport has changed."""
        before = self._generation.restarts
        self._is_refitting = True
        try:
            return self._refit(engine, only_if_stale)
        except (WorkerError, WeightSyncError) as error:
            if engine is self._generation:
                self.synced_version = None  # replicas may have some of the new weights
            if (declined := declined_transport(error)) is not None:
                self.sender.use_next_transport(str(declined))
                self._memory.shares_weights = self.sender.transport.shares_memory
                return None
            # A death explains a broken broadcast, whichever was noticed first.
            self._restart_or_raise(error, before)
            _log.warning("a generation worker died in the refit by %s; the refit is repeated", self.transport_name)
            return None
        finally:
            self._is_refitting = False

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

    def _restart_or_raise(self, error: Exception, before: int) -> None:
        if self._memory.limited:
            self._memory.free_for_engine()  # a new worker of an engine needs its whole share of free memory
        self._generation.restart_dead(error)
        if self._generation.restarts == before:
            raise error

    def request_canary(self) -> None:
        """Run the canary in the next `sync`, whatever it transfers."""
        if self.canary is not None:
            self.canary.request()

    def check_canary(self) -> float:
        """Run the canary with many rows now, between rollouts and training; returns its error in nats per token.

        Raises:
            WeightSyncError: the canary failed.
        """
        assert self.canary is not None
        with self._turn:
            if self.is_stale:  # an engine that discards its weights when it sleeps
                self.sync()
            self._memory.free_for_engine()
            with attributed(self.transport_name):
                return self.canary.check(self._policy, self._generation, self._memory)

    def score_canary(self) -> dict[str, float]:
        """Score the canary's rows that the policy could not score in the last `sync`; call it before an optimizer step.

        Returns:
            `refit/canary_error`, in nats per token; nothing if there are no such rows.

        Raises:
            WeightSyncError: the canary failed.
        """
        with attributed(self.transport_name):
            return self.canary.score(self._policy) if self.canary is not None else {}

    def check_sent(self) -> None:
        """Check that the policy sends other weights than before its last optimizer steps; `sync` does it where weights move.

        Raises:
            BrokenPromiseError: it sends the same.
        """
        self.sender.check_sent()

    def close(self) -> None:
        """Leave process groups, free buffers and release the engine; calling it twice is fine."""
        if self._generation.weight_owner is self:
            self._generation.weight_owner = None
        self.sender.transport.close()

    def _empty_cache(self, engine: GenerationInterface, seconds: dict[str, float]) -> None:
        with timed(seconds, "prove_s"):
            if not engine.invalidate_kv_cache():
                raise WeightSyncError(
                    "The generation backend could not empty its prefix cache after the refit, so it would continue from keys "
                    "and values of older weights. Let its running requests finish, or abort them, before a refit."
                )
        seconds["paused_s"] += time.perf_counter()

    def _run_canary(self, engine: GenerationInterface) -> dict[str, float]:
        """Run the canary unless fingerprints cover what the engine computes with and its workers have passed it before.

        A wrong scale of adapters is only seen once B has grown from 0, so it also runs after 1, 2, 4, 8, ... steps.
        """
        restarts, version = self._generation.restarts, self._policy.weight_version
        self._first_version = version if self._first_version is None else self._first_version
        steps = version - self._first_version
        has_grown = self.sender.sends_adapters and steps > 0 and steps & (steps - 1) == 0
        if self.canary is None or (self.sender.covers_engine and not (has_grown or self.canary.is_due(restarts))):
            return {}
        return self.canary.run(self._policy, engine, restarts=restarts, memory=self._memory)

    def _streaming(self, engine: GenerationInterface) -> AbstractContextManager[Callable[[], dict[str, float]]]:
        moves = engine is self._generation and self.synced_version not in (None, self._policy.weight_version)
        if self.canary is None or not moves:
            return nullcontext(dict)
        return self.canary.over_refit(self._policy, engine)

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


class NoEngine:
    """Sends nothing; algorithms call `sync` as if there were an engine."""

    def sync(self, *, only_if_stale: bool = False) -> dict[str, float]:
        """Does nothing.

        Returns:
            No metrics.
        """
        return {}
