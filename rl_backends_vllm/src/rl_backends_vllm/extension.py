"""Mixed into vLLM's worker class: a single RPC method for refit operations that preserves exceptions.

The engine's workers may run in other processes, from which vLLM reports exceptions as a line of text. Arguments and results are
therefore pickled here, so that the original exception is raised in the caller.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from rl_backends_vllm.device import enable_amx
from rl_backends_vllm.refit import VllmWeightReceiver
from rl_backends_vllm.shm_cleanup import unlink_shared_memory

METHODS = frozenset(
    {
        "prepare_refit_info", "update_weights", "init_collective", "update_weights_from_collective", "weight_digests",
        "weight_fingerprint", "get_weight_version", "require_complete_weights", "leave_refit", "expected_weights",
    }
)  # fmt: skip
"""Receiver methods that may be called remotely."""


class RefitExtension:
    """Mixed into `vllm.v1.worker.worker_base.Worker` by `EngineArgs.worker_extension_cls`."""

    rlcore_receiver: VllmWeightReceiver | None = None

    def rlcore_init_receiver(self, replica: int, device: str) -> None:
        """Create the weight receiver of this process. Must be called first, before the first row."""
        enable_amx(device)
        unlink_shared_memory()
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        self.rlcore_receiver = VllmWeightReceiver(
            self,
            context=SimpleNamespace(rank=replica, device=device),
            rank_in_replica=self.rank,  # type: ignore[attr-defined]
            processes=parallel.world_size,
        )

    def rlcore_refit(self, method: str, arguments: bytes) -> bytes:
        """Call a method of the receiver with pickled (args, kwargs); returns its pickled result or exception."""
        if method not in METHODS:
            raise AttributeError(f"{method!r} is not a refit method")
        args, kwargs = pickle.loads(arguments)
        try:
            result: tuple[Any, Exception | None] = (getattr(self.rlcore_receiver, method)(*args, **kwargs), None)
        except Exception as error:  # raised again on the other side
            result = (None, error)
        return pickle.dumps(result)


def pack(*args: Any, **kwargs: Any) -> bytes:
    """Arguments for `rlcore_refit`."""
    return pickle.dumps((args, kwargs))


def unpack(answers: list[bytes]) -> list[Any]:
    """Results of all processes; raises the first exception."""
    results = [pickle.loads(answer) for answer in answers]
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]
