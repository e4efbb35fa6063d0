"""The Transformers backend of rlcore: policy and generation. Importing it loads neither torch nor Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_backends_hf.generation import HuggingFaceGeneration
    from rl_backends_hf.policy import HuggingFacePolicy

__all__ = ["HuggingFaceGeneration", "HuggingFacePolicy"]

__getattr__ = import_on_first_use(__name__)
