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
    section, name = policy.tokenizer, policy.tokenizer.name or policy.model_name
    tokenizer = load_tokenizer(name, chat_template=section.chat_template, chat_template_kwargs=section.chat_template_kwargs)
    # For checkpoints: where its files are, and whether they have its template.
    tokenizer.published = name, section.chat_template is None and not section.chat_template_kwargs
    return with_text_settings(tokenizer, policy)


def with_text_settings(tokenizer: Any, policy: PolicyConfig) -> Any:
    """The tokenizer with the attributes that `rl_train.data.decoding` and `guarded_text` read; they are never saved."""
    tokenizer.visible_special_tokens = policy.tokenizer.visible_special_tokens
    tokenizer.parse_control_tokens = policy.tokenizer.parse_control_tokens
    return tokenizer
