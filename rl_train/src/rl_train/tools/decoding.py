"""Decodes sampled answers for environments: special tokens are removed, except those that mark tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_MARKER = re.compile(r"tool|call|function|python_tag|\[ARGS\]", re.IGNORECASE)
"""Matches the special tokens with which models write tool calls, such as `[TOOL_CALLS]` and `<|python_tag|>`."""


def decode_answers(tokenizer: Any, answers: Sequence[torch.Tensor]) -> list[str]:
    """The text of sampled tokens, without special tokens such as end of turn and padding.

    Special tokens that mark tool calls stay: without them, an environment or parser could not tell a call from text. (Many
    tokenizers do not declare their markers as special; those are text anyway.)

    Args:
        tokenizer: A Transformers tokenizer.
        answers: [T] token ids of each answer.
    """
    markers, hidden = special_tokens(tokenizer)
    rows = [answer.tolist() for answer in answers]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
    if not markers:
        return texts
    return [
        tokenizer.decode([token for token in row if token not in hidden]) if not markers.isdisjoint(row) else text
        for row, text in zip(rows, texts, strict=True)
    ]


@lru_cache(maxsize=16)
def special_tokens(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The ids of the special tokens that mark tool calls, and of all other special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(number): str(token) for number, token in added.items() if token.special}
    markers = {number for number, text in special.items() if _MARKER.search(text)} - {tokenizer.eos_token_id}
    return frozenset(markers), frozenset(special.keys() - markers)
