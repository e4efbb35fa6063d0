"""The sending half of a refit, for policy workers: buckets, handles, broadcast and fingerprint.

A worker derives from `WeightSource` and defines how its weights are gathered (`iter_weights`) and their manifest
(`weight_manifest`). Gathering may be collective over the policy's ranks, so all of them iterate; rank 0 writes and digests.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.private_names import PrivateNames
from rl_core.weights.collective import WeightCollective
from rl_core.weights.cuda_ipc import GpuBuffer, device_uuid
from rl_core.weights.disk import write_tensors
from rl_core.weights.fingerprint import Kind, combine, tensor_digests
from rl_core.weights.manifest import dtype_of, fill, in_manifest_order, lay_out, manifest_to_send, split_into_buckets
from rl_core.weights.shared_memory import Segment

if TYPE_CHECKING:
    from rl_core.interfaces.worker_context import WorkerContext

DEFAULT_BUDGET_BYTES = 256 * 2**20
MOST_BYTES_ON_CPU = 16 * 2**20
"""Larger buckets do not help on a CPU: fresh pages cost several times a copy, and these stay in the last-level cache."""
_KEPT_BYTES = 128 * 2**20
"""Larger segments, for a tensor that is larger than a bucket, are unlinked after each refit."""
_numbers = itertools.count(1)

BufferT = TypeVar("BufferT", Segment, GpuBuffer)


class BufferPair(Generic[BufferT]):
    """Two buffers, each replaced by a larger one when needed; `allocate` returns one of a size in bytes."""

    def __init__(self, allocate: Callable[[int], BufferT]) -> None:
        self._allocate: Callable[[int], BufferT] = allocate
        self._buffers: list[BufferT | None] = [None, None]
        self._turn = 0

    def next(self, size: int) -> BufferT:
        """The next buffer, with space for `size` bytes; its previous bucket is lost."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.size < size:
            if buffer is not None:
                buffer.close()
            self._buffers[self._turn] = buffer = self._allocate(size)
        return buffer

    def keep(self, most_bytes: int) -> None:
        """Keep buffers of up to `most_bytes` for the next refit, which uses them in the same order; free larger ones."""
        self._turn = 0
        for turn, buffer in enumerate(self._buffers):
            if buffer is not None and buffer.size > most_bytes:
                buffer.close()
                self._buffers[turn] = None

    def close(self) -> None:
        """Free both; calling it twice is fine."""
        self.keep(-1)


@dataclass(frozen=True)
class OpenRefit:
    """One refit from `prepare_weights_for_ipc` to `finish_refit`."""

    id: str
    version: int
    manifest: RefitManifest
    sent: RefitManifest
    """The forms in which the weights are sent."""
    buckets: list[list[str]]


class WeightSource(PrivateNames, ABC):
    """Mixin of a policy worker: the refit methods of `ColocatablePolicyInterface`, for one rank."""

    context: WorkerContext
    _refit: OpenRefit | None = None
    _segments: BufferPair[Segment] | None = None
    _gpu_buffers: BufferPair[GpuBuffer] | None = None
    _collective: WeightCollective | None = None

    @abstractmethod
    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor), gathered one at a time, in the manifest's order; the named ones, or all.

        Every rank is called with the same names. A yielded tensor is valid only until the next step of the iterator.
        """

    @abstractmethod
    def weight_manifest(self) -> RefitManifest:
        """Name to (shape, dtype) of every tensor that `iter_weights` yields, under its checkpoint's names, each once."""

    @abstractmethod
    def get_weight_version(self) -> int:
        """Number of optimizer steps behind the weights."""

    def prepare_refit_info(self) -> dict[str, Any]:
        """Name to (shape, dtype) of every weight that a refit sends."""
        return dict(self.weight_manifest())

    def prepare_weights_for_ipc(
        self, budget_bytes: int = DEFAULT_BUDGET_BYTES, *, receiver_dtypes: Mapping[str, str] | None = None
    ) -> list[list[str]]:
        """Start a refit of the current weights; ends an unfinished one.

        Args:
            budget_bytes: maximum size of a bucket.
            receiver_dtypes: name of each weight to send to the receiver's dtype: wider weights are rounded to it before they
                are sent. All weights, in their own dtype, by default.

        Returns:
            Names in buckets of at most `budget_bytes`; a larger tensor is a separate bucket.
        """
        self.finish_refit()
        manifest = _only(self.weight_manifest(), receiver_dtypes)
        budget = min(budget_bytes, MOST_BYTES_ON_CPU) if self.context.device == "cpu" else budget_bytes
        sent = manifest_to_send(manifest, receiver_dtypes or {})
        buckets = split_into_buckets(sent, budget_bytes=budget)
        self._refit = OpenRefit(f"{os.getpid()}-{next(_numbers)}", self.get_weight_version(), manifest, sent, buckets)
        return buckets

    def get_weights_ipc_handles(
        self, keys: Sequence[str], *, by_reference: bool = False, file: str | None = None
    ) -> dict[str, Any]:
        """Make one bucket available to other processes of the node; see `rl_core.weights.cuda_ipc`.

        Valid until the call after the next one, or `finish_refit`.

        Returns:
            The handles on rank 0 (on GPUs: on every rank, those of that rank's device), an empty mapping elsewhere.

        Raises:
            WeightSyncError: no refit has been started, the weights have changed since, or memory is short.
        """
        refit = self._open_refit()
        placements, num_bytes = lay_out(refit.sent, keys)
        header = {"refit": refit.id, "weight_version": refit.version, "num_bytes": num_bytes}
        if by_reference:
            tensors = dict(self.iter_weights(keys))
            return {**header, "num_bytes": 0, "kind": "by_reference", "tensors": tensors}
        if file is not None and self.context.rank == 0:
            exported = self.iter_weights(keys)
            write_tensors(file, ((name, tensor.to(dtype_of(refit.sent[name][1]))) for name, tensor in exported))
            return {**header, "kind": "disk", "file": file}
        if self.context.device == "cuda" and file is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._gpu_buffers = self._gpu_buffers or BufferPair(partial(GpuBuffer, device=device))
            buffer = self._gpu_buffers.next(num_bytes)
            fill(buffer.bytes, placements, self.iter_weights(keys), refit.manifest)
            devices = {device_uuid(device): buffer.handle()}
            return {**header, "kind": "cuda_ipc", "devices": devices, "placements": placements}
        if self.context.rank != 0:
            _exhaust(self.iter_weights(keys))
            return {}
        self._segments = self._segments or BufferPair(Segment)
        segment = self._segments.next(num_bytes)
        fill(segment.buffer, placements, self.iter_weights(keys), refit.manifest)
        return {**header, "kind": "shared_memory", "segment": segment.name, "placements": placements}

    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float = 600.0) -> None:
        """Join the weight collective as its rank 0; leaves a previous one. The policy's other ranks do not join."""
        self._leave_collective()
        if self.context.rank == 0:
            self._collective = WeightCollective(ip, port, world_size, rank=0, device=self.context.device, timeout_s=timeout_s)
            self._collective.join()

    def broadcast_weights_for_collective(self) -> int:
        """Send every tensor of the manifest to all ranks of the weight collective; starts a refit if there is none.

        Returns:
            Bytes sent.
        """
        if self._refit is None:
            self.prepare_weights_for_ipc()
        refit = self._open_refit()
        buckets = in_manifest_order(refit.buckets, refit.manifest)
        tensors = self.iter_weights([name for names in buckets for name in names])
        try:
            if self.context.rank != 0:
                return 0
            if self._collective is None:
                raise WeightSyncError("The policy has not joined a weight collective: call init_collective on both sides.")
            return self._collective.send(
                refit.manifest, buckets, tensors, sent=refit.sent, refit=refit.id, version=refit.version
            )
        finally:
            # The other ranks gather all tensors, even if rank 0 cannot send them.
            _exhaust(tensors)

    def weight_digests(self, *, dtypes: Mapping[str, str] | None = None, kind: Kind | None = None) -> dict[str, str]:
        """Name to digest of each tensor as the receiver would store it; empty on ranks other than 0.

        Args:
            dtypes: name of each tensor to digest to the receiver's dtype; all, in their own dtype, by default.
            kind: the receiver's; XXH3 by default.
        """
        whole = self.weight_manifest()
        digested = _only(whole, dtypes)
        tensors = self.iter_weights(None if len(digested) == len(whole) else list(digested))
        if self.context.rank != 0:
            _exhaust(tensors)
            return {}
        wanted = {name: dtype_of(dtype) for name, dtype in (dtypes or {}).items()}
        return tensor_digests(tensors, kind=kind or "xxh3", dtypes=wanted)

    def weight_fingerprint(self, *, dtypes: Mapping[str, str] | None = None, kind: Kind | None = None) -> str:
        """The combined digest of `weight_digests`; an empty string on ranks other than 0."""
        digests = self.weight_digests(dtypes=dtypes, kind=kind)
        return combine(digests, kind=kind or "xxh3") if self.context.rank == 0 else ""

    def finish_refit(self) -> None:
        """End the refit and free buffers on the GPU; calling it twice is fine.

        Shared memory is kept for the next refit, because allocating its pages costs several times the copy.
        """
        self._refit = None
        if self._gpu_buffers is not None:
            self._gpu_buffers.close()
            self._gpu_buffers = None
            torch.cuda.empty_cache()  # a colocated engine may need the memory
        if self._segments is not None:
            self._segments.keep(_KEPT_BYTES)

    def leave_refit(self) -> None:
        """End the refit and the collective and unlink shared memory, at shutdown; calling it twice is fine."""
        self.finish_refit()
        self._leave_collective()
        if self._segments is not None:
            self._segments.close()
            self._segments = None

    def _leave_collective(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None

    def _open_refit(self) -> OpenRefit:
        if self._refit is None:
            raise WeightSyncError("No refit is open: call prepare_weights_for_ipc first.")
        version = self.get_weight_version()
        if version != self._refit.version:
            raise WeightSyncError(
                f"The policy went from weight version {self._refit.version} to {version} during a refit, so some of "
                "the tensors would be older than the rest. Do not train until finish_refit."
            )
        return self._refit


def _only(manifest: RefitManifest, names: Mapping[str, str] | None) -> RefitManifest:
    """The manifest of these names; the whole one if there are none."""
    return {name: form for name, form in manifest.items() if name in names} if names else manifest


def _exhaust(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Take part in a gather for another rank."""
    for _ in tensors:
        pass
