"""Any OpenAI-compatible server as a generation backend of rlcore. Importing it does not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_backends_openai.config import OpenAIConfig
    from rl_backends_openai.generation import OpenAIGeneration

__all__ = ["OpenAIConfig", "OpenAIGeneration"]

__getattr__ = import_on_first_use(__name__)
