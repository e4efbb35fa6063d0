"""The tokenizer of a policy's section."""

from __future__ import annotations

from typing import Any

from rl_core.config.policy_sections import PolicyConfig
from rl_core.data.tokenizer import load_tokenizer


def load_policy_tokenizer(policy: PolicyConfig) -> Any:
    """The tokenizer of a policy's section, with its chat template and template variables.

    Raises:
        DataError: As `load_tokenizer`.
    """
    tokenizer = load_tokenizer(
        policy.tokenizer.name or policy.model_name,
        chat_template=policy.tokenizer.chat_template,
        chat_template_kwargs=policy.tokenizer.chat_template_kwargs,
    )
    tokenizer.visible_special_tokens = policy.tokenizer.visible_special_tokens  # see `rl_train.data.decoding`
    return tokenizer
