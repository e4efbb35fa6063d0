"""Reads tying, end tokens and the longest row from a model's config files, without weights and without the model's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.data import hub
from rl_core.data.generation_io import end_token_ids


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Values from a model's config and generation config."""

    tie_word_embeddings: bool | None
    """None if no config sets it."""
    end_ids: frozenset[int]
    """Tokens that end a completion, according to these files."""


def read_model_files(
    name_or_path: str, tokenizer: Any, *, trust_remote_code: bool = False, eos_token_id: int | None = None
) -> ModelFiles:
    """Read the config files; missing ones are skipped.

    Args:
        name_or_path: a model's name, a folder, or a GGUF file.
        tokenizer: the policy's tokenizer; its end-of-sequence token also ends a completion.
        trust_remote_code: whether code that comes with the model is run.
        eos_token_id: must be one of the end tokens, if the model has a config; not checked if it is None.

    Raises:
        ConfigError: the model has other end tokens than `eos_token_id`.
    """
    from transformers import GenerationConfig

    config = read_model_config(name_or_path, trust_remote_code=trust_remote_code)
    location, named = hub.pretrained_location(name_or_path)
    sampling = None if "gguf_file" in named else _if_there(lambda: GenerationConfig.from_pretrained(location, **named))
    text = config.get_text_config(decoder=True) if config is not None else None
    tied = getattr(text, "tie_word_embeddings", None)
    return ModelFiles(
        tie_word_embeddings=bool(tied) if tied is not None else None,
        end_ids=end_token_ids(sampling, config, text, tokenizer, repeated=eos_token_id if config is not None else None),
    )


def read_model_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a model; None if there is none, or if it needs code that may not run."""
    return _if_there(lambda: hub.read_model_config(name_or_path, trust_remote_code=trust_remote_code))


def _if_there(read: Any) -> Any:
    """The result of `read`; None if Transformers finds no such file, or one that needs code which came with the model."""
    try:
        return read()
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class PositionLimit:
    """Number of positions of a model.

    Attributes:
        tokens: `max_position_embeddings`, times the factor of scaled rotary embeddings.
        is_rotary: whether positions are rotary embeddings, which can also be computed for longer rows.
    """

    tokens: int
    is_rotary: bool


def position_limit(
    name_or_path: str, *, config_overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PositionLimit | None:
    """The limit of a model; None if its config cannot be read or has none.

    Args:
        name_or_path: a model's name, a folder, or a GGUF file.
        config_overrides: fields of the config to replace.
        trust_remote_code: whether to run code that comes with the model.
    """
    config = read_model_config(name_or_path, trust_remote_code=trust_remote_code)
    if config is None:
        return None
    for key, value in (config_overrides or {}).items():
        setattr(config, key, value)
    text = config.get_text_config(decoder=True)
    tokens = getattr(text, "max_position_embeddings", None)
    if not isinstance(tokens, int):
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    reach = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or tokens))
        for kind in _kinds(rope)
        if kind.get("factor")
    ]
    return PositionLimit(tokens=max(tokens, *reach) if reach else tokens, is_rotary=bool(rope))


def _kinds(rope: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters, of each kind of layer if they differ."""
    yield rope
    yield from (value for value in rope.values() if isinstance(value, Mapping))
