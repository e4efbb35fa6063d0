"""What is mixed into vLLM's worker class: one door for the verbs of a refit, and the errors that come back through it.

The engine's workers may be in other processes, and then an exception crosses as a line of text. Here verbs come in and results
go out as bytes that vLLM only carries, so that an error arrives as what it was.
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
        "weight_fingerprint", "get_weight_version", "refuse_torn_weights", "leave_refit",
    }
)  # fmt: skip
"""What the door lets in."""


class RefitExtension:
    """Mixed into `vllm.v1.worker.worker_base.Worker` by `EngineArgs.worker_extension_cls`."""

    rlcore_receiver: VllmWeightReceiver | None = None

    def rlcore_init_receiver(self, replica: int, device: str) -> None:
        """Say which replica this process belongs to; before any other verb, and before the first row."""
        enable_amx(device)
        unlink_shared_memory()
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        self.rlcore_receiver = VllmWeightReceiver(
            self,
            context=SimpleNamespace(rank=replica, device=device),
            rank_in_replica=self.rank,  # type: ignore[attr-defined]
            processes=parallel.world_size,
        )

    def rlcore_refit(self, verb: str, arguments: bytes) -> bytes:
        """Call a verb of the receiver with pickled (args, kwargs); what it gives or raises, pickled."""
        if verb not in METHODS:
            raise AttributeError(f"{verb!r} is no verb of a refit")
        args, kwargs = pickle.loads(arguments)
        try:
            result: tuple[Any, Exception | None] = (getattr(self.rlcore_receiver, verb)(*args, **kwargs), None)
        except Exception as error:  # raised again on the other side
            result = (None, error)
        return pickle.dumps(result)


def pack(*args: Any, **kwargs: Any) -> bytes:
    """Arguments for `rlcore_refit`."""
    return pickle.dumps((args, kwargs))


def unpack(answers: list[bytes]) -> list[Any]:
    """What each process answered; raises the first error."""
    results = [pickle.loads(answer) for answer in answers]
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]
