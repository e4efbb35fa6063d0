"""Any OpenAI-compatible server as a generation backend of rlcore. Importing it does not load torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends_openai.config import OpenAIConfig
    from rl_backends_openai.generation import OpenAIGeneration

__all__ = ["OpenAIConfig", "OpenAIGeneration"]

_MODULES = {
    "OpenAIConfig": "rl_backends_openai.config",
    "OpenAIGeneration": "rl_backends_openai.generation",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
