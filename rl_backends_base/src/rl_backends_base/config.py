"""The section of an engine on `TokenwiseWorker`. Does not import torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from rl_core.config.schema import GenerationConfig, PolicyConfig, TokenizerConfig


class TokenwiseConfig(GenerationConfig):
    """`policy.generation` of an engine on `TokenwiseWorker`, which reads these keys."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; by default that of the policy, and at most that of the model."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer, for stop strings; by default that of the policy."""

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section, with unset values taken from the policy."""
        values = {
            "max_model_len": self.max_model_len or policy.max_total_sequence_length,
            "tokenizer": self.tokenizer or policy.tokenizer,
        }
        return super().for_policy(policy).model_copy(update=values)
