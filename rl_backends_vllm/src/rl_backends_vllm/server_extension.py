"""Worker extension for vLLM's own server: replaces weights by files of one folder, with strings as arguments.

`--worker-extension-cls rl_backends_vllm.server_extension.ServerWeights` adds the methods below to every worker. Clients call
them through the route `/collective_rpc`, which exists only with `VLLM_SERVER_DEV_MODE=1` and passes strings. Nothing is
unpickled: weights are safetensors files below `RLCORE_WEIGHT_UPDATES_DIR`, and arguments and results are JSON or plain text. A
load packs a tied output layer again and fails if a layer was not updated (`rl_backends_vllm.refit`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_backends_vllm.device import enable_amx
from rl_backends_vllm.refit import VllmWeightReceiver
from rl_core.backend import file_digest, refuse_non_finite_file, resolve_below
from rl_core.errors import RLCoreError, WeightSyncError

FOLDER = "RLCORE_WEIGHT_UPDATES_DIR"
"""Environment variable with the folder of the weights."""
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# vLLM imports this module before it computes anything.
enable_amx(_DEVICE)


class ServerWeights:
    """Mixed into `vllm.v1.worker.worker_base.Worker`. Each method returns JSON; a failure is `{"error": reason}`."""

    rlcore_weights: VllmWeightReceiver | None = None

    def rlcore_prepare(self, weights: str) -> str:
        """Begin an update.

        Args:
            weights: JSON of name to [shape, dtype].

        Returns:
            `dtypes`: name to the dtype in which each weight must be sent.
        """

        def prepare() -> dict[str, Any]:
            manifest = {name: (tuple(shape), dtype) for name, (shape, dtype) in json.loads(weights).items()}
            return {"dtypes": self._rlcore_receiver().prepare_refit_info(manifest)}

        return _as_json(prepare)

    def rlcore_update(self, file: str, refit: str, version: str, digest: str) -> str:
        """Load one file.

        Args:
            file: its path below the folder.
            refit: name of the update.
            version: number of optimizer steps behind the weights.
            digest: XXH3-128 of the file.
        """

        def update() -> dict[str, Any]:
            path = resolve_below(_folder(), file)
            if file_digest(path) != digest:
                raise WeightSyncError(
                    f"{file} differs from the file that was written: this server's folder is another one or out of date. "
                    "Start the server with the policy's refit_folder."
                )
            refuse_non_finite_file(path)
            handles = {"kind": "disk", "file": str(path), "refit": refit, "weight_version": int(version)}
            self._rlcore_receiver().update_weights(handles)
            return {"weight_version": self._rlcore_receiver().get_weight_version()}

        return _as_json(update)

    def rlcore_version(self) -> str:
        """`weight_version`; -1 before the first update and during an update."""
        return _as_json(lambda: {"weight_version": self._rlcore_receiver().get_weight_version()})

    def rlcore_fingerprint(self) -> str:
        """`fingerprint` of the received weights, and `digests`, name to the digest of each."""

        def fingerprint() -> dict[str, Any]:
            receiver = self._rlcore_receiver()
            return {"fingerprint": receiver.weight_fingerprint(), "digests": receiver.weight_digests()}

        return _as_json(fingerprint)

    def _rlcore_receiver(self) -> VllmWeightReceiver:
        if self.rlcore_weights is None:
            self.rlcore_weights = VllmWeightReceiver(
                self,
                context=SimpleNamespace(rank=0, device=_DEVICE),
                rank_in_replica=self.rank,  # type: ignore[attr-defined]
                processes=self.vllm_config.parallel_config.world_size,  # type: ignore[attr-defined]
            )
        return self.rlcore_weights


def _folder() -> Path:
    folder = os.environ.get(FOLDER)
    if not folder:
        raise WeightSyncError(f"The server was started without {FOLDER}, the folder of the weights.")
    return Path(folder).resolve()


def _as_json(function: Callable[[], dict[str, Any]]) -> str:
    """The result; an error must be returned, because vLLM stops its engine if a worker raises."""
    try:
        return json.dumps(function())
    except (RLCoreError, ValueError, TypeError, AssertionError, RuntimeError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
