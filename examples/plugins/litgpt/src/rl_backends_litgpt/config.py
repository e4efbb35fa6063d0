"""The settings of `litgpt`. `rlcore validate` imports this module, so it must not import torch."""

from typing import Literal

from rl_backends_base.config import TokenwiseConfig
from rl_core.config.schema import PolicyConfig


class LitGPTPolicyConfig(PolicyConfig):
    """The section `policy` with `backend: litgpt`."""

    activation_checkpointing: Literal[False] = False
    """Unsupported: activations are never recomputed."""


class LitGPTGenerationConfig(TokenwiseConfig):
    """The section `policy.generation` with `backend: litgpt`."""
