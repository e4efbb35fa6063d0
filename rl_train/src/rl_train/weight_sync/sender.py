"""Sends a policy's weights by a transport and proves that they arrived.

Versions are compared in every refit. Fingerprints are compared too, unless they are turned off: the policy digests what it has
sent while the engine loads it, in the kind of digest and the dtypes of the engine. The fingerprints that were sent also show
whether training changes the weights at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any, SupportsIndex, get_args

from rl_core.errors import BrokenPromiseError, NotSupportedError, WeightSyncError, WorkerDiedError, WorkerError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, RefitManifest, TransportContext, WeightTransport
from rl_core.testing.outputs.models import class_label
from rl_core.weights.adapters import adapters_in
from rl_core.weights.fingerprint import Kind, describe_differences
from rl_train.weight_sync.transports import free_loopback_port

_log = logging.getLogger(__name__)
DEFAULT_BUFFER_BYTES = 512 * 2**20
_SHOWN = 5
STEPS = 20
"""Optimizer steps after which weights that are rounded or hardly trained must have changed."""


class WeightSender:
    """Sends all weights of a policy by one transport; nothing is opened before the first refit.

    Args:
        policy: the sender.
        transport: one that both backends support, see `usable_transports`.
        others: those that are tried if the engine declines it.
        buffer_bytes: maximum bytes in transit at a time.
        deadline_s: timeout of one refit in seconds.
        folder: folder for weights sent by disk; the system's temporary folder by default.
        num_receivers: number of generation workers.
        wait: waits for pending calls (`wait_together`); needed by transports that call both sides at once.
        rendezvous: address and free port on the node of the policy's rank 0; this machine's loopback by default.
        prove: compare fingerprints after each refit; versions are always compared.
        digests_are_held: whether the engine digests the tensors that it computes with, so that fingerprints cover them.

    Attributes:
        transport: sends the weights.
        covers_engine: whether every refit compares fingerprints of the tensors that the engine computes with.
        sent: the fingerprints of the weights that the policy has sent.
        sends_adapters: whether the policy sends adapters, next to frozen weights that are sent and verified once.
    """

    def __init__(
        self,
        policy: ColocatablePolicyInterface,
        transport: type[WeightTransport],
        *,
        others: Sequence[type[WeightTransport]] = (),
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        deadline_s: float = 600.0,
        folder: Path | None = None,
        num_receivers: int = 1,
        wait: Callable[[Sequence[Any], float], Any] | None = None,
        rendezvous: Callable[[], tuple[str, int]] | None = None,
        prove: bool = True,
        digests_are_held: bool = True,
    ) -> None:
        self._policy = policy
        self._prove = prove
        self.covers_engine = prove and digests_are_held
        self.sent = SentWeights()
        self.sends_adapters = False
        self._frozen_sent_at: int | None = None
        """Restarts of the engine when all its replicas had the frozen weights."""
        self._kind: Kind | None = None
        self._dtypes: Mapping[str, str] = {}
        self._beside: ThreadPoolExecutor | None = None
        self._digested: Future[str] | None = None
        self._context = TransportContext(
            buffer_bytes=buffer_bytes,
            deadline_s=deadline_s,
            folder=folder or Path(gettempdir()),
            wait=wait or wait_for_each,
            rendezvous=rendezvous or free_loopback_port,
            num_receivers=num_receivers,
            on_sent=self._start_policy_digest,
            receiver_dtypes=lambda: self._dtypes,
        )
        self.transport, self._others = transport(self._context), [*others]

    def use_next_transport(self, reason: str) -> None:
        """Send by the next of `others`, because the engine declines the present one.

        Raises:
            NotSupportedError: there is no other.
        """
        declined = f"the engine declines weights {self.transport.name}"
        if not self._others:
            raise NotSupportedError(f"{declined}: {reason}", key="policy.generation.refit_transport")
        self.transport.close()
        self.transport = self._others.pop(0)(self._context)
        _log.warning("%s, so %s is used: %s", declined, self.transport.name, reason)

    def send(self, engine: GenerationInterface, seconds: dict[str, float], *, is_first: bool) -> int:
        """Send all weights and verify that they arrived; returns the bytes moved.

        Args:
            engine: the engine, or its restarted replicas.
            seconds: the durations of the phases are added to it.
            is_first: whether no refit has been verified before.

        Raises:
            WeightSyncError: the engine's weights are not the policy's; names the tensors.
            BrokenPromiseError: `push` does not return a number of bytes, or the policy sends the same weights after training.
        """
        with timed(seconds, "prepare_s"):
            manifest = self._to_send(engine, is_first=is_first)
            seconds["paused_s"], dtypes = -time.perf_counter(), engine.prepare_refit_info(manifest)
            self._dtypes = {name: dtype for name, (_, dtype) in manifest.items()} | dict(dtypes or {})
        self._digested = None
        with timed(seconds, "push_s"), ThreadPoolExecutor(1, "rlcore-digest") as self._beside:
            moved: object = self.transport.push(self._policy, engine)
        if not isinstance(moved, SupportsIndex):
            raise BrokenPromiseError(
                f"`push` of the weight transport {class_label(type(self.transport))} returned {moved!r}. It must return the "
                "number of bytes moved, as an integer: 0 if nothing was copied."
            )
        with timed(seconds, "prove_s"):
            self._check_versions(engine)
            # Memory that is shared was compared once; the engine checks in each refit that it is still the policy's.
            if self._prove and (is_first or not self.transport.shares_memory):
                self._check_fingerprints(engine)
        self._frozen_sent_at = engine.restarts
        return int(moved)

    def _to_send(self, engine: GenerationInterface, *, is_first: bool) -> RefitManifest:
        """The manifest of a refit: adapters alone if every replica has the frozen weights."""
        manifest: RefitManifest = self._policy.prepare_refit_info() or {}
        adapters = adapters_in(manifest)
        self.sends_adapters = bool(adapters)
        frozen_are_held = not is_first and self._frozen_sent_at == engine.restarts
        # An engine that discards its weights when it sleeps has no version.
        return adapters if adapters and frozen_are_held and engine.weight_version >= 0 else manifest

    def already_equal(self, engine: GenerationInterface, seconds: dict[str, float]) -> bool:
        """Whether an engine of the policy's version has its weights; without `prove`, the version decides."""
        if not self._prove:
            return True
        with timed(seconds, "prove_s"):
            manifest = self._policy.prepare_refit_info() or {}
            held = engine.weight_digests()
            kind = kind_of(engine.weight_fingerprint())
            dtypes = {name: digest.partition("[")[0] for name, digest in held.items() if name in manifest}
            return self._policy.weight_digests(dtypes=dtypes, kind=kind) == held

    def check_sent(self) -> None:
        """Check that the policy sends other weights than before its last optimizer steps.

        Raises:
            BrokenPromiseError: it sends the same.
        """
        if self._kind is not None:
            self._record_sent(self._policy.weight_fingerprint(dtypes=self._dtypes, kind=self._kind))

    def _record_sent(self, fingerprint: str) -> None:
        exact = set(self._dtypes.values()) <= {"float32"}
        self.sent.check(fingerprint, version=self._policy.weight_version, exact=exact)

    def _start_policy_digest(self) -> None:
        """Compute the policy's fingerprint, in the kind of the previous refit, while the engine loads the sent weights."""
        if self._prove and self._kind is not None and self._beside is not None:
            self._digested = self._beside.submit(self._policy.weight_fingerprint, dtypes=self._dtypes, kind=self._kind)

    def _check_versions(self, engine: GenerationInterface) -> None:
        policy_version, engine_version = self._policy.weight_version, engine.weight_version
        if policy_version == engine_version:
            return
        if engine_version < 0:
            engine.weight_fingerprint()  # names the missing tensors if others have arrived
        names = list(self._policy.prepare_refit_info() or ())
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise WeightSyncError(
            f"After the refit the policy is at weight version {policy_version} and the generation backend at {engine_version}: "
            + ("no weights arrived, or those of another step. " if engine_version >= 0 else "no weights arrived. ")
            + f"`push` of the weight transport {class_label(type(self.transport))} must send all {len(names)} tensors in every "
            f"refit ({', '.join(names[:_SHOWN])}{more}). Resume the run from its last checkpoint."
        )

    def _check_fingerprints(self, engine: GenerationInterface) -> None:
        arrived = engine.weight_fingerprint()
        kind = kind_of(arrived)
        digested = self._digested.result() if self._digested is not None and kind == self._kind else None
        self._kind = kind
        if (digested or self._policy.weight_fingerprint(dtypes=self._dtypes, kind=kind)) == arrived:
            self._record_sent(arrived)
            return
        lines = describe_differences(self._policy.weight_digests(dtypes=self._dtypes, kind=kind), engine.weight_digests())
        raise WeightSyncError(
            f"The generation backend's weights differ from the policy's at version {self._policy.weight_version}:\n"
            + "\n".join(f"  {line}" for line in lines)
            + f"\nThey were sent by {self.transport.name}. The run stops, because its samples would not be the policy's."
        )


def kind_of(fingerprint: str) -> Kind:
    """The kind of a combined digest.

    Raises:
        WeightSyncError: it is not a combined digest of `rl_core.weights.fingerprint`.
    """
    kind = fingerprint.partition(":")[0]
    if kind not in get_args(Kind):
        raise WeightSyncError(
            f"The fingerprint {fingerprint!r} does not start with any of {', '.join(get_args(Kind))}: it was not created by "
            "rl_core.weights.fingerprint, so it cannot be compared."
        )
    return kind  # type: ignore[return-value]


class SentWeights:
    """The fingerprint of the weights that were sent last, and the optimizer steps since.

    Attributes:
        label: the policy's name in errors.
    """

    def __init__(self) -> None:
        self.label = "the policy"
        self._fingerprint: str | None = None
        self._steps = 0
        self._certain = False

    def expect_change(self, steps: int, *, certain: bool) -> None:
        """Count optimizer steps with a gradient; `certain` if they are large enough to change some float32 weight."""
        self._steps += steps
        self._certain = self._certain or certain

    def check(self, fingerprint: str, *, version: int, exact: bool) -> None:
        """Compare with the weights that were sent before.

        Args:
            fingerprint: of the weights that were sent now.
            version: their version.
            exact: the engine stores them in float32, so that no step is lost in rounding.

        Raises:
            BrokenPromiseError: they are the same, although the policy was trained.
        """
        same, self._fingerprint = fingerprint == self._fingerprint, fingerprint
        if same and (self._steps >= STEPS or (exact and self._certain)):
            raise BrokenPromiseError(
                f"{self.label} sent the weights of version {version}, but they are the same as before the last {self._steps} "
                "optimizer step(s), which had a gradient and a learning rate above 0. `get_weights_ipc_handles` and "
                "`broadcast_weights_for_collective` must send, and `weight_fingerprint` must digest, the current weights. "
                "Check that the policy does not send a copy, and that it takes the steps that it reports."
            )
        if not same:
            self._steps, self._certain = 0, False


def wait_for_each(pending: Sequence[Any], deadline_s: float) -> None:
    """Wait for `concurrent.futures` futures, if no worker group provides pending calls."""
    end = time.monotonic() + deadline_s
    for call in pending:
        call.result(timeout=max(end - time.monotonic(), 0.0))


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
