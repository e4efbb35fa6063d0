"""The Transformers backend of rlcore: policy and generation. Importing it loads neither torch nor Transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends_hf.generation import HuggingFaceGeneration
    from rl_backends_hf.policy import HuggingFacePolicy

__all__ = ["HuggingFaceGeneration", "HuggingFacePolicy"]

_MODULES = {"HuggingFaceGeneration": "rl_backends_hf.generation", "HuggingFacePolicy": "rl_backends_hf.policy"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
