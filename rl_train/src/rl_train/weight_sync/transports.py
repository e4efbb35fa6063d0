"""Weight transports: by reference, over shared memory, over a process group, and through files; and the choice of one.

Except by reference, weights are sent in buckets: the policy writes one while the generation backend loads the previous one.
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import Any, ClassVar

import psutil

from rl_core.errors import DeadlineExceededError, MissingCapabilityError, RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, TransportContext, WeightTransport
from rl_core.plugins.component import capability_problem
from rl_core.rendezvous.interfaces import free_port
from rl_core.weights.collective import abort_rendezvous
from rl_core.weights.manifest import manifest_to_send, tensor_bytes
from rl_core.weights.shared_memory import sweep

_BUCKETS_AT_ONCE = 16
"""At most 256 MiB on a CPU, or a larger tensor; going through all weights once per bucket takes longer than sharing them."""
_PREFIX = "rlcore-refit"


def usable_transports(
    transports: Sequence[type[WeightTransport]],
    *,
    policy_supports: Collection[str],
    generation_supports: Collection[str],
    name: str | None = None,
) -> list[type[WeightTransport]]:
    """Those whose requirements both sides have, in the same order: at least one.

    Args:
        transports: the registered transports, in the order in which they are tried.
        policy_supports: capabilities of the policy backend.
        generation_supports: capabilities of the generation backend.
        name: the only one to try.

    Raises:
        MissingCapabilityError: there is none; lists what each side supports.
    """
    by_policy, by_generation = (_supported(transports, names) for names in (policy_supports, generation_supports))
    usable = {*by_policy} & {*by_generation} & ({name} if name is not None else {*by_policy})
    if usable:
        return [transport for transport in transports if transport.name in usable]
    supported = (
        f"Registered transports: {_listed(transport.name for transport in transports)}. The policy backend supports "
        f"{_listed(by_policy)}, the generation backend {_listed(by_generation)}."
    )
    if name is not None:
        raise MissingCapabilityError(
            f"The weight transport {name!r} (policy.generation.refit_transport) cannot be used. {supported}"
        )
    raise MissingCapabilityError(f"Policy and generation backend have no weight transport in common. {supported}")


def _supported(transports: Sequence[type[WeightTransport]], capabilities: Collection[str]) -> list[str]:
    """The names of the transports whose requirements a backend with these capabilities has."""
    for transport in transports:
        if (problem := capability_problem(transport.requires)) is not None:
            raise MissingCapabilityError(f"The weight transport {transport.name!r} cannot be used: {problem}")
    return [transport.name for transport in transports if {*transport.requires} <= {*capabilities}]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def free_loopback_port() -> tuple[str, int]:
    """This machine's loopback address and a port that is free now and that this process has not used before."""
    return "127.0.0.1", free_port("127.0.0.1")


def push_buckets(
    context: TransportContext,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    write: Callable[[int, list[str]], Mapping[str, Any]],
    *,
    overdue: Callable[[str], str],
) -> int:
    """Send all weights of a policy; two buckets are in transit at a time.

    Args:
        context: size of both buckets together, and the deadline of the refit.
        policy: the sender.
        generation: the receiver.
        write: writes the bucket with this number, from 0, and these names; returns the argument of `update_weights`.
        overdue: text of the error if the deadline has passed while a bucket is loaded, such as "3 of 7".

    Returns:
        Bytes sent.

    Raises:
        DeadlineExceededError: the refit took longer than `context.deadline_s`.
    """
    deadline = time.monotonic() + context.deadline_s
    buckets = policy.prepare_weights_for_ipc(context.buffer_bytes // 2, receiver_dtypes=context.receiver_dtypes())
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlcore-refit")
    loading: list[Future[None]] = []
    moved = 0

    def finish_loading(number: int) -> None:
        if wait(loading, timeout=max(deadline - time.monotonic(), 0.0)).not_done:
            raise DeadlineExceededError(overdue(f"{number} of {len(buckets)}"))
        for loaded in loading:
            loaded.result()

    try:
        for number, names in enumerate(buckets):
            handles = write(number, names)
            finish_loading(number)
            loading = [reader.submit(generation.update_weights, handles)]
            moved += int(handles["num_bytes"])
        context.on_sent()
        finish_loading(len(buckets))
    except BaseException:
        # Otherwise the engine would continue loading into the next refit.
        wait(loading, timeout=max(deadline - time.monotonic(), 0.0))
        raise
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
    return moved


class ByReferenceTransport(WeightTransport):
    """Policy and generation backend in one process.

    The engine sees each optimizer step immediately, but its weight version changes only at the next refit. Until then it
    refuses to sample (`WeightSink.refuse_changed_weights`).
    """

    name: ClassVar[str] = "by_reference"
    requires: ClassVar[tuple[str, ...]] = ("by_reference",)
    shares_memory: ClassVar[bool] = True

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        buckets = policy.prepare_weights_for_ipc(self.context.buffer_bytes, receiver_dtypes=self.context.receiver_dtypes())
        # Nothing is copied, so buckets only limit what the policy computes for a refit, such as merged adapters.
        for first in range(0, len(buckets), _BUCKETS_AT_ONCE):
            keys = [key for bucket in buckets[first : first + _BUCKETS_AT_ONCE] for key in bucket]
            generation.update_weights(policy.get_weights_ipc_handles(keys, by_reference=True))
        return 0


class CollectiveTransport(WeightTransport):
    """Policy and generation backend anywhere: broadcasts from the policy's rank 0 to every generation worker."""

    name: ClassVar[str] = "collective"
    requires: ClassVar[tuple[str, ...]] = ("collective",)

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._joined: tuple[int, int] | None = None
        """Restarts and receivers of the group; None without one."""
        self._left: set[tuple[str, int]] = set()

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        wait, deadline_s = self.context.wait, self.context.deadline_s
        group = generation.restarts, generation.num_workers
        if self._joined != group:
            self._join(policy, generation)
        # Joined again after any error, because an unfinished broadcast leaves the group unusable.
        self._joined = None
        # Two buckets are in transit at a time.
        policy.prepare_weights_for_ipc(self.context.buffer_bytes // 2, receiver_dtypes=self.context.receiver_dtypes())
        wait([*policy.broadcast_weights_for_collective(), *generation.update_weights_from_collective()], deadline_s)
        self._joined = group
        to = self.context.receiver_dtypes()
        sent = manifest_to_send(policy.prepare_refit_info() or {}, to)
        return sum(tensor_bytes(shape, dtype) for name, (shape, dtype) in sent.items() if not to or name in to)

    def _join(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> None:
        ip, port = self._new_meeting_point()
        ranks = 1 + generation.num_workers
        calls = [*policy.init_collective(ip, port, ranks), *generation.init_collective(ip, port, ranks)]
        try:
            self.context.wait(calls, self.context.deadline_s)
        except RLCoreError:
            abort_rendezvous(ip, port)
            raise

    def _new_meeting_point(self) -> tuple[str, int]:
        """A port that was not used before, because a rank that leaves late may still hold the old one."""
        for _ in range(100):
            address = self.context.rendezvous()
            if address not in self._left:
                self._left.add(address)
                return address
        raise WeightSyncError(f"No new port was found for the weight collective in 100 attempts; the last was {address[1]}.")


class DiskTransport(WeightTransport):
    """Policy and generation backend on any nodes with a shared folder (`policy.generation.refit_folder`)."""

    name: ClassVar[str] = "disk"
    requires: ClassVar[tuple[str, ...]] = ("disk",)

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        with _own_folder(self.context.folder) as folder:

            def write(number: int, names: list[str]) -> dict[str, Any]:
                (folder / f"{number - 2}.safetensors").unlink(missing_ok=True)
                return policy.get_weights_ipc_handles(names, file=str(folder / f"{number}.safetensors"))

            return push_buckets(self.context, policy, generation, write, overdue=self._overdue)

    def _overdue(self, file: str) -> str:
        return (
            f"The refit by disk has taken {self.context.deadline_s:g} s, and the generation backend has not loaded file "
            f"{file} in {self.context.folder}. Use a faster folder (policy.generation.refit_folder), or "
            "raise cluster.deadlines.refit_s."
        )


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder for one refit."""
    _sweep(parent)
    folder = parent / f"{_PREFIX}-{gethostname()}-{getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightSyncError(
            f"Cannot create a folder for weights in {parent} ({error}). Choose another: policy.generation.refit_folder."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders of drivers on this host that no longer run."""
    for folder in parent.glob(f"{glob.escape(f'{_PREFIX}-{gethostname()}')}-*"):
        owner = folder.name.rpartition("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class SharedMemoryTransport(WeightTransport):
    """Policy and generation backend on one node: one copy into shared memory, one copy out of it, in buckets.

    On GPUs the same methods use buffers in the memory of the common GPU, by CUDA IPC.
    """

    name: ClassVar[str] = "shared_memory"
    requires: ClassVar[tuple[str, ...]] = ("shared_memory",)

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        sweep()
        return push_buckets(
            self.context, policy, generation, lambda _, names: policy.get_weights_ipc_handles(names), overdue=self._overdue
        )

    def close(self) -> None:
        sweep()

    def _overdue(self, bucket: str) -> str:
        return (
            f"The refit over shared memory has taken {self.context.deadline_s:g} s, and the generation backend has not "
            f"loaded bucket {bucket}. Check the load of the node, or raise cluster.deadlines.refit_s."
        )
