"""The tokenizer that goes with a policy's model, if there is one; knows no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_core.data.tokenizer import load_tokenizer

_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")


def find_tokenizer(config: MegatronPolicyConfig) -> Any:
    """The policy's tokenizer, or None where its model's folder has none and the config names no other.

    Raises:
        DataError: there should be one, and it cannot be loaded.
    """
    source = config.tokenizer.name or config.model_name
    folder = Path(source).expanduser()
    # Asked for a tokenizer that is not there, Transformers may make an empty one.
    absent = folder.is_dir() and not any(path for pattern in _FILES for path in folder.glob(pattern))
    if config.tokenizer.name is None and absent:
        return None
    return load_tokenizer(
        source, chat_template=config.tokenizer.chat_template, trust_remote_code=config.megatron_cfg.trust_remote_code
    )
