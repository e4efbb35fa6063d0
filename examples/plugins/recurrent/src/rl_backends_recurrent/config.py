"""The settings of `recurrent`. `rlcore validate` imports this module, so it must not import torch."""

from typing import Literal

from rl_backends_base.config import TokenwiseConfig
from rl_core.config.schema import PolicyConfig


class RecurrentPolicyConfig(PolicyConfig):
    """The section `policy` with `backend: recurrent`."""

    activation_checkpointing: Literal[False] = False
    """Unsupported: activations are never recomputed."""


class RecurrentGenerationConfig(TokenwiseConfig):
    """The section `policy.generation` with `backend: recurrent`."""
