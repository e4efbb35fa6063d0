"""The receiving half of a refit, for generation workers: accepts, counts and digests weights.

A worker derives from `WeightReceiver` and defines its expected weights and how to load them. If its live tensors have the names
of the manifest, it derives from `WeightSink` instead, which does both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import NotSupportedError, TransportDeclinedError, WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.private_names import PrivateNames
from rl_core.weights.adapters import adapter_ranks, adapters_in, is_adapter
from rl_core.weights.collective import WeightCollective
from rl_core.weights.cuda_ipc import open_handles
from rl_core.weights.fingerprint import combine, natural_kind, tensor_digests
from rl_core.weights.manifest import dtype_name, manifest_of, refuse_differences
from rl_core.weights.shared_memory import MappedSegments

if TYPE_CHECKING:
    from rl_core.interfaces.worker_context import WorkerContext

NO_VERSION = -1
"""Weight version of an engine before its first refit, and during a refit."""


class WeightReceiver(PrivateNames, ABC):
    """Mixin of a generation worker: the refit methods of `GenerationInterface`, for one receiver of weights."""

    context: WorkerContext
    _ledger: RefitProgress | None = None
    _is_mixed: bool = False
    """Whether tensors of a refit have arrived, and no refit has completed since."""
    _weight_version: int = NO_VERSION
    _holds_frozen: bool = False
    """Whether weights that are frozen next to adapters have arrived, so that a refit may leave them out."""
    _weight_collective: WeightCollective | None = None
    _segments: MappedSegments | None = None

    @abstractmethod
    def expected_weights(self) -> RefitManifest:
        """Name to (shape, dtype of its digest) of every weight of the engine, under its checkpoint's names."""

    @abstractmethod
    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load one bucket; its tensors are the sender's memory, which is reused after this returns."""

    @abstractmethod
    def digests_of_weights(self) -> dict[str, str]:
        """Name to digest of each weight that the last refit sent, for `weight_digests`."""

    def expect_adapters(self, ranks: Mapping[str, int]) -> None:
        """Prepare layers for adapters; `expected_weights` then includes their tensors (`rl_core.weights.adapters`).

        Args:
            ranks: name of each adapted layer, that of its weight in the checkpoint without `.weight`, to the adapter's rank.

        Raises:
            WeightSyncError: there is no such layer.
            NotSupportedError: the engine cannot compute with adapters.
        """
        raise NotSupportedError(
            f"{type(self).__name__} cannot compute with adapters: set policy.generation.lora to merged.",
            key="policy.generation.lora",
        )

    def refit_begins(self) -> None:
        """Called before the first bucket of a refit is loaded."""
        return None

    def weights_changed(self) -> None:
        """Called when all tensors are new, to refresh anything derived from them (quantized copies, captured graphs)."""
        return None

    def load_by_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with the sender's own tensors from now on.

        Raises:
            TransportDeclinedError: the engine cannot do that, so the run sends copies by the next transport.
        """
        raise TransportDeclinedError(
            f"{type(self).__name__} cannot compute with the policy's own tensors: set policy.generation.refit_transport to "
            "shared_memory."
        )

    def collective_rank(self) -> int:
        """This receiver's rank in the weight collective; the policy is rank 0."""
        return 1 + self.context.rank

    def get_weight_version(self) -> int:
        """Number of optimizer steps behind the weights; -1 before the first refit and during a refit."""
        return self._weight_version

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        """Begin a refit: store the manifest and compare it with the engine's own weights.

        A manifest of adapters alone leaves out the frozen weights, which must have arrived before.

        Returns:
            Name to the dtype of each digest.

        Raises:
            WeightSyncError: names or shapes differ (lists all of them), or frozen weights have not arrived.
        """
        expected = self.expected_weights()
        if any(name not in expected or expected[name][0] != shape for name, (shape, _) in adapters_in(info).items()):
            self.expect_adapters(adapter_ranks(info))
            expected = self.expected_weights()
        if _leaves_out_frozen(info):
            if not self._holds_frozen:
                raise WeightSyncError("Only adapters are sent, but the frozen weights next to them have not arrived before.")
            expected = adapters_in(expected)
        refuse_differences(info, expected)
        receiver_dtypes = {name: dtype for name, (_, dtype) in expected.items()}
        self._ledger = RefitProgress(dict(info), receiver_dtypes)
        return receiver_dtypes

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        """Load one bucket; the sender's memory is not kept, except by reference.

        Raises:
            WeightSyncError: a tensor is unknown, repeated or of the wrong form, or it belongs to another refit.
        """
        if self._segments is None:
            self._segments = MappedSegments()
        tensors = open_handles(ipc_handles, self._device(), self._segments)
        self._take(
            tensors,
            refit=ipc_handles["refit"],
            version=ipc_handles["weight_version"],
            by_reference=ipc_handles["kind"] == "by_reference",
        )
        if self._device().type == "cuda":
            # The sender reuses its memory once this call returns, and copies are asynchronous.
            torch.cuda.current_stream(self._device()).synchronize()

    def init_collective(self, ip: str, port: int, world_size: int, left_out: int = 0, *, timeout_s: float = 600.0) -> None:
        """Join the weight collective after the policy, which is its rank 0; leaves a previous one.

        Args:
            ip: address of rank 0.
            port: its port.
            world_size: number of ranks.
            left_out: receivers of lower rank that do not join, because only restarted replicas are refitted.
            timeout_s: timeout of joining and of each broadcast.
        """
        self.leave_refit()
        rank = self.collective_rank() - left_out
        self._weight_collective = WeightCollective(
            ip, port, world_size, rank=rank, device=self.context.device, timeout_s=timeout_s
        )
        self._weight_collective.join()

    def update_weights_from_collective(self) -> None:
        """Receive and load all tensors of one refit.

        Raises:
            WeightSyncError: as `update_weights`, or the policy failed; the collective is then still usable.
        """
        if self._weight_collective is None:
            raise WeightSyncError("This engine has not joined a weight collective: call init_collective on both sides.")
        self._weight_collective.receive(
            lambda tensors, refit, version: self._take(tensors, refit=refit, version=version, by_reference=False)
        )

    def weight_digests(self) -> dict[str, str]:
        """Name to digest of each tensor that the engine computes with.

        Raises:
            WeightSyncError: some tensors of the current refit are missing; names them.
        """
        self.require_complete_weights()
        return self.digests_of_weights()

    def weight_fingerprint(self) -> str:
        """The combined digest of `weight_digests`."""
        return combine(self.weight_digests(), kind=natural_kind(self._device()))

    @property
    def has_incomplete_weights(self) -> bool:
        """Whether some tensors of a refit have arrived, but not all. A refit that was only prepared changes nothing."""
        return self._is_mixed

    def require_complete_weights(self) -> None:
        """Raise WeightSyncError with the names of the missing tensors if some have arrived, but not all."""
        if self._is_mixed and self._ledger is not None:
            self._ledger.refuse_if_incomplete()

    def leave_refit(self) -> None:
        """Leave the collective, at shutdown; calling it twice is fine."""
        if self._weight_collective is not None:
            self._weight_collective.close()
            self._weight_collective = None

    def _take(self, tensors: Mapping[str, torch.Tensor], *, refit: str, version: int, by_reference: bool) -> None:
        if self._ledger is None:
            raise WeightSyncError("Weights arrived before their manifest: call prepare_refit_info first.")
        begins = self._ledger.admit(refit, version, manifest_of(tensors))
        self._weight_version, self._is_mixed = NO_VERSION, True
        self._holds_frozen &= self._ledger.leaves_out_frozen
        if begins:
            self.refit_begins()
        if by_reference:
            self.load_by_reference(tensors)
        else:
            self.load_weights(tensors)
        self._ledger.note(tensors)
        if self._ledger.complete_version is not None:
            self.weights_changed()
            self._holds_frozen = True
            self._weight_version, self._is_mixed = self._ledger.complete_version, False

    def _device(self) -> torch.device:
        return torch.device(self.context.device)


class RefitProgress:
    """Accepts every tensor of a manifest exactly once, all from one refit of one weight version; then the next refit."""

    def __init__(self, manifest: RefitManifest, receiver_dtypes: Mapping[str, str] | None = None) -> None:
        """Progress of a refit that has not begun.

        Args:
            manifest: the announced tensors.
            receiver_dtypes: name to the receiver's own dtype, which a tensor may have instead of the announced one.
        """
        self.manifest = manifest
        self.receiver_dtypes = receiver_dtypes or {}
        self.leaves_out_frozen = _leaves_out_frozen(manifest)
        self._refit: str | None = None
        self._version = -1
        self._arrived: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Names that have not arrived, in the manifest's order."""
        return [name for name in self.manifest if name not in self._arrived]

    @property
    def complete_version(self) -> int | None:
        """The weight version of the refit once all has arrived, None before."""
        return None if self.missing else self._version

    def admit(self, refit: str, version: int, forms: Mapping[str, tuple[tuple[int, ...], str]]) -> bool:
        """Check one bucket before any of it is loaded.

        Args:
            refit: the refit that the bucket belongs to, according to the sender.
            version: its weight version, according to the sender.
            forms: name to (shape, dtype name) of each tensor in it.

        Returns:
            Whether it is the first bucket of its refit.

        Raises:
            WeightSyncError: it belongs to another refit or version, or a tensor is unknown, repeated or of the wrong form.
        """
        if not self.missing and refit != self._refit:
            self._refit, self._arrived = None, set()
        is_first = self._refit is None
        self._admit_refit(refit, version, forms)
        problems = [f"{name!r} is not in the manifest" for name in forms if name not in self.manifest]
        problems += [f"{name!r} arrived twice" for name in forms if name in self._arrived]
        problems += [
            f"{name!r} arrived as {_described(form)}, but the manifest says {_described(self.manifest[name])}"
            for name, form in forms.items()
            if name in self.manifest and not self._fits(name, form)
        ]
        if problems:
            raise WeightSyncError(
                f"Weights are rejected in the refit to version {version}: {'; '.join(problems[:5])}"
                + (f"; and {len(problems) - 5} more." if len(problems) > 5 else ".")
            )
        return is_first

    def _fits(self, name: str, form: tuple[tuple[int, ...], str]) -> bool:
        shape, dtype = self.manifest[name]
        return tuple(form[0]) == tuple(shape) and form[1] in (dtype, self.receiver_dtypes.get(name))

    def note(self, names: Iterable[str]) -> None:
        """Record that the tensors with these names have been loaded."""
        self._arrived.update(names)

    def refuse_if_incomplete(self) -> None:
        """Raise WeightSyncError, naming the missing tensors, unless all have arrived."""
        missing = self.missing
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"{len(missing)} of {len(self.manifest)} weights have not arrived in this refit: {shown}. "
                "The engine has a mixture of versions and must not sample."
            )

    def _admit_refit(self, refit: str, version: int, names: Iterable[str]) -> None:
        if self._refit is None:
            self._refit, self._version = refit, version
        if refit != self._refit:
            raise WeightSyncError(
                f"A bucket of refit {refit} (version {version}: {', '.join(list(names)[:3])}, ...) arrived during "
                f"refit {self._refit} (version {self._version}). Begin each refit with prepare_refit_info."
            )
        if version != self._version:
            raise WeightSyncError(
                f"Weights {', '.join(list(names)[:3])}, ... arrived as version {version} in a refit to version {self._version}."
            )


def _leaves_out_frozen(manifest: RefitManifest) -> bool:
    """Whether a refit sends adapters alone."""
    return bool(manifest) and all(map(is_adapter, manifest))


def _described(form: tuple[tuple[int, ...], str]) -> str:
    return f"{form[1]} {list(form[0])}"


class WeightSink(WeightReceiver):
    """Mixin of a generation worker: the refit methods of `GenerationInterface`, for one replica."""

    _shared: Mapping[str, tuple[torch.Tensor, int]] | None = None
    """The policy's tensors of the last refit by reference, with their version counters."""

    @abstractmethod
    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Name to the live tensor of the engine (never a copy), under its checkpoint's names; tied tensors once."""

    def replaceable_weights(self) -> Mapping[str, torch.Tensor]:
        """Tensors whose memory can be replaced by the policy's; they differ from `named_weights` if those are parts."""
        return self.named_weights()

    def to_replaceable(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The policy's tensors, combined like `replaceable_weights`.

        Raises:
            TransportDeclinedError: they cannot be combined without a copy.
        """
        return tensors

    def expected_weights(self) -> RefitManifest:
        return manifest_of(self.named_weights())

    def digests_of_weights(self) -> dict[str, str]:
        live = self.named_weights()
        names = live if self._ledger is None else self._ledger.manifest
        return tensor_digests(((name, live[name]) for name in names), kind=natural_kind(self._device()))

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into those of `named_weights`, casting; an engine with its own loader overrides this."""
        live = self.named_weights()
        with torch.no_grad():
            for name, tensor in tensors.items():
                live[name].copy_(tensor)

    def load_by_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        live = self.replaceable_weights()
        try:
            replacements = self.to_replaceable(tensors)
            for name, tensor in replacements.items():
                _refuse_other_form(name, live[name], tensor)
        except TransportDeclinedError:
            if self._shared is not None:  # copies would be written into the policy's memory
                for tensor in live.values():
                    tensor.data = tensor.data.clone()
                self._shared = None
            raise
        for name, tensor in replacements.items():
            live[name].data = tensor.detach()
        self._shared = {**(self._shared or {}), **{name: (tensor, _writes(tensor)) for name, tensor in tensors.items()}}
        after = self.named_weights()
        for name, tensor in tensors.items():
            if after[name].data_ptr() != tensor.data_ptr():
                raise WeightSyncError(
                    f"Weight {name!r} does not alias the policy's after a refit by reference: named_weights of "
                    f"{type(self).__name__} returns copies, not the tensors that the engine computes with."
                )

    def refuse_changed_weights(self) -> None:
        """Raise WeightSyncError if tensors shared with the policy were changed since the last refit."""
        changed = [name for name, (tensor, writes) in (self._shared or {}).items() if _writes(tensor) != writes]
        if changed:
            raise WeightSyncError(
                f"The policy has changed {len(changed)} weights since the last weight sync, such as {changed[0]!r}, and this "
                "engine computes with the same memory: it would sample weights newer than version "
                f"{self.get_weight_version()}. Call `WeightSynchronizer.sync` after each optimizer step, before sampling "
                "continues."
            )


def _refuse_other_form(name: str, live: torch.Tensor, tensor: torch.Tensor) -> None:
    if (live.dtype, live.device) != (tensor.dtype, tensor.device):
        raise TransportDeclinedError(
            f"Weight {name!r} is {dtype_name(tensor.dtype)} on {tensor.device} in the policy but {dtype_name(live.dtype)} on "
            f"{live.device} in the engine, so it cannot be shared by reference. Use the same precision for both, or set "
            "policy.generation.refit_transport: shared_memory."
        )


def _writes(tensor: torch.Tensor) -> int:
    """Number of in-place changes that torch has counted; 0 for inference tensors, which are not counted."""
    return 0 if tensor.is_inference() else tensor._version
