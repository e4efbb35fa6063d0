"""The longest row that a model has positions for, from its config file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_train.diagnostics.model_files import read_model_config


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
