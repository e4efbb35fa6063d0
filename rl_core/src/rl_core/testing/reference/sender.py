"""A policy without training: it holds reference weights and sends them to an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import RefitManifest
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.testing.reference.model import Weights
from rl_core.weights.fingerprint import Kind
from rl_core.weights.manifest import manifest_of
from rl_core.weights.source import WeightSource


class ReferenceSender(WeightSource):
    """The sending half of a refit.

    Args:
        weights: the weights of version 0.
        folder: for weights sent as files.
    """

    def __init__(self, weights: Weights, folder: Path) -> None:
        self.context = WorkerContext(
            rank=0, world_size=1, local_rank=0, node_rank=0, master_address="127.0.0.1", master_port=0, run_in_process=True
        )
        self.weights, self._version, self._folder = dict(weights), 0, folder
        self.received = self.weights
        """What the engine has after the last complete refit."""

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, self.weights[name]) for name in (names if names is not None else self.weights))

    def weight_manifest(self) -> RefitManifest:
        return manifest_of(self.weights)

    def get_weight_version(self) -> int:
        return self._version

    def train(self, *, seed: int) -> None:
        """Replace every weight, as an optimizer step does; the version increases by one."""
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in self.weights.items()
        }
        self._version += 1

    def refit(self, engine: GenerationInterface, capabilities: Collection[str], *, leave_out: int = 0) -> None:
        """Send the weights with a primitive that the engine declares.

        Args:
            engine: the receiver.
            capabilities: of the engine.
            leave_out: number of tensors at the end that are not sent.
        """
        dtypes = engine.prepare_refit_info(self.prepare_refit_info()) or {}
        self.prepare_weights_for_ipc(receiver_dtypes=dtypes)
        names = list(self.weights)
        try:
            for number, bucket in enumerate([names[:5], names[5 : len(names) - leave_out]]):
                engine.update_weights(
                    self.get_weights_ipc_handles(bucket, **transfer(capabilities, self._folder / f"{number}.safetensors"))
                )
        finally:
            self.finish_refit()
        self.received = self.weights

    def fingerprint(self, engine: GenerationInterface) -> str:
        """The fingerprint of the weights as the engine stores them, in the kind of the engine's."""
        digests = engine.weight_digests()
        dtypes = {name: digest.partition("[")[0] for name, digest in digests.items() if name in self.weights}
        kind: Kind = "wsum" if engine.weight_fingerprint().startswith("wsum") else "xxh3"
        return self.weight_fingerprint(dtypes=dtypes, kind=kind)


def transfer(capabilities: Collection[str], file: Path) -> Mapping[str, Any]:
    """Arguments of `get_weights_ipc_handles` for a primitive that both ends declare; `file` is for weights sent as files."""
    if "by_reference" in capabilities:
        return {"by_reference": True}
    if "shared_memory" in capabilities:
        return {}
    return {"file": str(file)}
