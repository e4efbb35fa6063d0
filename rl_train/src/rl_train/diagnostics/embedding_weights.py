"""Reads a policy's embeddings through its refit methods, which every backend has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_core.errors import NotSupportedError, WeightSyncError
from rl_core.interfaces.policy import ColocatablePolicyInterface, RefitManifest
from rl_core.weights.cuda_ipc import device_uuid, open_handles

_INPUTS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "embedding")
_OUTPUTS = ("lm_head", "embed_out", "output_layer", "output")
"""Names of the modules with these weights in models of Transformers."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingWeights:
    """The matrices between token ids and hidden states."""

    input_name: str
    """Name in the manifest."""
    input: torch.Tensor
    """[V, H], on the CPU: the row of each token id."""
    output_name: str | None
    """Name in the manifest; None if the policy sends no separate output matrix: it is tied to the input."""
    output: torch.Tensor | None
    """[V, H], on the CPU."""

    @property
    def are_tied(self) -> bool:
        """Whether input and output share one matrix: the policy sends only one."""
        return self.output is None

    @property
    def are_equal(self) -> bool:
        """Whether input and output matrix have the same values."""
        return self.output is None or (self.output.shape == self.input.shape and torch.equal(self.output, self.input))


def read_embeddings(policy: ColocatablePolicyInterface, *, by_reference: bool, buffer_bytes: int = 2**28) -> EmbeddingWeights:
    """Copy the policy's current embeddings.

    Args:
        policy: a policy on this node.
        by_reference: whether the policy computes in this process.
        buffer_bytes: maximum number of bytes in transit.

    Raises:
        NotSupportedError: none of its weights has the name of an input embedding.
        WeightSyncError: its GPU is not visible to this process.
    """
    manifest = policy.prepare_refit_info() or {}
    input_name, output_name = _named(manifest, _INPUTS), _named(manifest, _OUTPUTS)
    if input_name is None:
        raise NotSupportedError(
            f"None of the policy's {len(manifest)} weights has the name of an input embedding "
            f"(expected one of: {', '.join(_INPUTS)})."
        )
    wanted = {input_name, output_name} - {None}
    read: dict[str, torch.Tensor] = {}
    try:
        for keys in policy.prepare_weights_for_ipc(buffer_bytes):
            if wanted.isdisjoint(keys):
                continue
            handles = policy.get_weights_ipc_handles(keys, by_reference=by_reference)
            opened = open_handles(handles, _device(handles))
            read.update({name: opened[name].detach().to("cpu", copy=True) for name in keys if name in wanted})
    finally:
        policy.finish_refit()
    return EmbeddingWeights(
        input_name=input_name,
        input=read[input_name],
        output_name=output_name,
        output=read[output_name] if output_name is not None else None,
    )


def _named(manifest: RefitManifest, modules: tuple[str, ...]) -> str | None:
    """The matrix of the first of `modules` that exists; the largest if several submodels have one."""
    for module in modules:
        found = [
            name for name, (shape, _) in manifest.items() if len(shape) == 2 and name.split(".")[-2:] == [module, "weight"]
        ]
        if found:
            return max(found, key=lambda name: manifest[name][0][0])
    return None


def _device(handles: Mapping[str, object]) -> torch.device:
    """The device on which the handles can be opened: the visible GPU that they belong to, else the CPU."""
    devices = handles.get("devices")
    if not isinstance(devices, Mapping):
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) in devices:
            return torch.device("cuda", index)
    raise WeightSyncError(
        f"The policy's weights are on GPUs ({', '.join(devices)}) that are not visible to this process. Add them to "
        "CUDA_VISIBLE_DEVICES."
    )
