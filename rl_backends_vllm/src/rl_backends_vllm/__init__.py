"""The vLLM backend of rlcore: generation. Importing it loads neither torch nor vLLM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends_vllm.config import VllmConfig
    from rl_backends_vllm.generation import VllmGeneration
    from rl_backends_vllm.worker import VllmGenerationWorker

__all__ = ["VllmConfig", "VllmGeneration", "VllmGenerationWorker"]

_MODULES = {
    "VllmConfig": "rl_backends_vllm.config",
    "VllmGeneration": "rl_backends_vllm.generation",
    "VllmGenerationWorker": "rl_backends_vllm.worker",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
