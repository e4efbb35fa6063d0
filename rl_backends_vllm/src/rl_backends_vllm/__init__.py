"""The vLLM backend of rlcore: generation. Importing it loads neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_backends_vllm.config import VllmConfig
    from rl_backends_vllm.generation import VllmGeneration
    from rl_backends_vllm.worker import VllmGenerationWorker

__all__ = ["VllmConfig", "VllmGeneration", "VllmGenerationWorker"]

__getattr__ = import_on_first_use(__name__)
