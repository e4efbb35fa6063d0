"""Checks the variables that a config passes to chat templates. Does not import torch."""

from __future__ import annotations

from typing import Any

_RESERVED = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
)  # fmt: skip


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The variables, if they are valid.

    Raises:
        ValueError: A name is reserved or is not an identifier, or a value is not plain YAML.
    """
    for name, value in kwargs.items():
        if name in _RESERVED:
            raise ValueError(f"{name!r} is set by rlcore for every conversation: remove it")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be a template variable: use letters, digits and underscores")
        _check_value(name, value)
    return kwargs


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, dict) and (odd := [key for key in value if not isinstance(key, str)]):
        raise ValueError(f"{name!r} has the key {odd[0]!r}: keys must be text")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_value(name, inner)
    elif not (value is None or isinstance(value, str | bool | int | float)) or value in (float("inf"), float("-inf")):
        raise ValueError(f"{name!r} is {value!r}: expected text, a number, true, false, null, or lists and mappings of them")
