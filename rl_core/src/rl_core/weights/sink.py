"""The receiving half of a refit, for generation workers: checks, loads and fingerprints; knows no sender.

A worker mixes `WeightSink` in and says what its live tensors are (`named_weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.weights.collective import WeightCollective
from rl_core.weights.fingerprint import combine, natural_kind, tensor_digest
from rl_core.weights.handles import open_handles
from rl_core.weights.ledger import RefitLedger, forms_of
from rl_core.weights.manifest import dtype_name, refuse_differences

if TYPE_CHECKING:
    from rl_core.cluster.worker_context import WorkerContext

NO_VERSION = -1
"""Weight version of an engine before its first refit, and while one is under way."""


class WeightSink(ABC):
    """Mixin of a generation worker: the refit verbs of `GenerationInterface`, for one replica."""

    context: WorkerContext
    _ledger: RefitLedger | None = None
    _weight_version: int = NO_VERSION
    _weight_collective: WeightCollective | None = None

    @abstractmethod
    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Name to the tensor that the engine computes with (never a copy), under Hugging Face names, tied ones once."""

    def weights_changed(self) -> None:
        """All tensors are new: refresh whatever the engine derived from them (quantised copies, captured graphs)."""
        return None

    def get_weight_version(self) -> int:
        """Optimizer steps that the weights have seen; -1 before the first refit and from a refit's start to its end."""
        return self._weight_version

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        """Begin a refit: take the manifest and compare it with the engine's own weights.

        Returns:
            Name to the dtype that the engine keeps.

        Raises:
            WeightSyncError: names or shapes differ; all of them, in one error.
        """
        live = self.named_weights()
        refuse_differences(info, live)
        self._ledger = RefitLedger(dict(info))
        return {name: dtype_name(tensor.dtype) for name, tensor in live.items()}

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        """Load one bucket; nothing of the sender's memory is kept, but by reference.

        Raises:
            WeightSyncError: a tensor is unknown, repeated or of another form, or it belongs to another refit.
        """
        tensors = open_handles(ipc_handles, self._device())
        self._take(
            tensors,
            refit=ipc_handles["refit"],
            version=ipc_handles["weight_version"],
            by_reference=ipc_handles["kind"] == "by_reference",
        )
        if self._device().type == "cuda":
            # The sender reuses its memory once this call returns, and copies are asynchronous.
            torch.cuda.current_stream(self._device()).synchronize()

    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float = 600.0) -> None:
        """Join the weight collective after the policy, which is its rank 0; leaves an earlier one."""
        self.leave_refit()
        self._weight_collective = WeightCollective(
            ip, port, world_size, rank=1 + self.context.rank, device=self.context.device, timeout_s=timeout_s
        )

    def update_weights_from_collective(self) -> None:
        """Receive and load all tensors of one refit.

        Raises:
            WeightSyncError: as `update_weights`, or the policy gave up; the collective is then still usable.
        """
        if self._weight_collective is None:
            raise WeightSyncError("This engine has not joined a weight collective: call init_collective on both sides.")
        self._weight_collective.receive(
            lambda tensors, refit, version: self._take(tensors, refit=refit, version=version, by_reference=False)
        )

    def weight_digests(self) -> dict[str, str]:
        """Name to digest of each tensor that the engine computes with.

        Raises:
            WeightSyncError: tensors of the refit under way are missing; names them.
        """
        if self._ledger is not None:
            self._ledger.refuse_if_incomplete()
        kind = natural_kind(self._device())
        return {name: tensor_digest(tensor, kind=kind) for name, tensor in self.named_weights().items()}

    def weight_fingerprint(self) -> str:
        """The combined digest of `weight_digests`."""
        return combine(self.weight_digests(), kind=natural_kind(self._device()))

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into those of `named_weights`, casting; an engine with a loader of its own overrides it."""
        live = self.named_weights()
        with torch.no_grad():
            for name, tensor in tensors.items():
                live[name].copy_(tensor)

    def leave_refit(self) -> None:
        """Leave the collective, at shutdown; calling it twice is fine."""
        if self._weight_collective is not None:
            self._weight_collective.close()
            self._weight_collective = None

    def _take(self, tensors: Mapping[str, torch.Tensor], *, refit: str, version: int, by_reference: bool) -> None:
        if self._ledger is None:
            raise WeightSyncError("Weights arrived before their manifest: call prepare_refit_info first.")
        if self._ledger.complete_version is not None and not self._ledger.is_of(refit):
            self._ledger = RefitLedger(self._ledger.manifest)
        self._ledger.admit(refit, version, forms_of(tensors))
        self._weight_version = NO_VERSION
        if by_reference:
            self._alias(tensors)
        else:
            self.load_weights(tensors)
        self._ledger.note(tensors)
        if self._ledger.complete_version is not None:
            self.weights_changed()
            self._weight_version = self._ledger.complete_version

    def _alias(self, tensors: Mapping[str, torch.Tensor]) -> None:
        live = self.named_weights()
        for name, tensor in tensors.items():
            if (live[name].dtype, live[name].device) != (tensor.dtype, tensor.device):
                raise WeightSyncError(
                    f"Weight {name!r} is {dtype_name(tensor.dtype)} on {tensor.device} in the policy and "
                    f"{dtype_name(live[name].dtype)} on {live[name].device} in the engine: no sharing by reference. "
                    "Give both one precision, or set policy.generation.refit_transport: shared_memory."
                )
            live[name].data = tensor.detach()
        after = self.named_weights()
        for name, tensor in tensors.items():
            if after[name].data_ptr() != tensor.data_ptr():
                raise WeightSyncError(
                    f"Weight {name!r} does not alias the policy's after a refit by reference: named_weights of "
                    f"{type(self).__name__} gives copies, not the tensors that the engine computes with."
                )

    def _device(self) -> torch.device:
        return torch.device(self.context.device)
