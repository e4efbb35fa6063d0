"""A weight receiver whose live tensors have the names of the manifest: copies, aliases and digests them.

A worker derives from `WeightSink` and returns its live tensors from `named_weights`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest
from rl_core.weights.fingerprint import natural_kind, tensor_digests
from rl_core.weights.manifest import dtype_name, manifest_of
from rl_core.weights.receiver import WeightReceiver


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
        """The policy's tensors, combined like `replaceable_weights`."""
        return tensors

    def expected_weights(self) -> RefitManifest:
        return manifest_of(self.named_weights())

    def digests_of_weights(self) -> dict[str, str]:
        return tensor_digests(self.named_weights().items(), kind=natural_kind(self._device()))

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into those of `named_weights`, casting; an engine with its own loader overrides this."""
        live = self.named_weights()
        with torch.no_grad():
            for name, tensor in tensors.items():
                live[name].copy_(tensor)

    def load_by_reference(self, tensors: Mapping[str, torch.Tensor]) -> None:
        live = self.replaceable_weights()
        for name, tensor in self.to_replaceable(tensors).items():
            if (live[name].dtype, live[name].device) != (tensor.dtype, tensor.device):
                raise WeightSyncError(
                    f"Weight {name!r} is {dtype_name(tensor.dtype)} on {tensor.device} in the policy but "
                    f"{dtype_name(live[name].dtype)} on {live[name].device} in the engine, so it cannot be shared by "
                    "reference. Use the same precision for both, or set policy.generation.refit_transport: shared_memory."
                )
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


def _writes(tensor: torch.Tensor) -> int:
    """Number of in-place changes that torch has counted; 0 for inference tensors, which are not counted."""
    return 0 if tensor.is_inference() else tensor._version
