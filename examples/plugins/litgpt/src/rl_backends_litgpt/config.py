"""The settings of `litgpt`. `rlcore validate` imports this module, so it must not import torch."""

from typing import Literal

from pydantic import Field

from rl_core.config.schema import GenerationConfig, PolicyConfig


class LitGPTPolicyConfig(PolicyConfig):
    """The section `policy` with `backend: litgpt`."""

    activation_checkpointing: Literal[False] = False
    """Unsupported: activations are never recomputed."""


class LitGPTGenerationConfig(GenerationConfig):
    """The section `policy.generation` with `backend: litgpt`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; by default that of the policy."""

    def for_policy(self, policy):
        """This section, with unset values taken from the policy."""
        filled = super().for_policy(policy)
        return filled.model_copy(update={"max_model_len": self.max_model_len or policy.max_total_sequence_length})
