"""Finds the tokenizer of a policy's model."""

from __future__ import annotations

from typing import Any

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_core.data.tokenizer import load_tokenizer_if_there


def find_tokenizer(config: MegatronPolicyConfig) -> Any:
    """The policy's tokenizer, or None if its model's folder has none and the config does not name one.

    Raises:
        DataError: there should be one, but it cannot be loaded.
    """
    return load_tokenizer_if_there(
        config.model_name,
        tokenizer_name=config.tokenizer.name,
        chat_template=config.tokenizer.chat_template,
        chat_template_kwargs=config.tokenizer.chat_template_kwargs,
        trust_remote_code=config.megatron_cfg.trust_remote_code,
    )
