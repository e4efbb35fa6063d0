"""Counts the unknown tokens of a dataset: a model cannot learn from text that its tokenizer does not cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROWS_READ = 256
"""Rows that are tokenized to measure the fraction: about a second, before a worker starts."""
WARN_ABOVE = 0.01
"""Fraction of unknown tokens above which a run warns."""
_LOGS = ("message_log", "message_log_chosen", "message_log_rejected")


@dataclass(frozen=True, kw_only=True)
class UnknownTokens:
    """The unknown tokens of the first rows of a dataset."""

    fraction: float
    """Fraction of all tokens of these rows."""
    rows: int
    """Number of rows."""
    example: str
    """The text of the first message with an unknown token; empty if there is none."""


def count_unknown_tokens(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> UnknownTokens | None:
    """The unknown tokens of the first `ROWS_READ` rows; None if the tokenizer has no separate unknown token.

    Args:
        rows: tokenized prompts, conversations or pairs.
        tokenizer: their tokenizer. Byte-level tokenizers cover all text; some use their end token as unknown token.

    Raises:
        DataError: a row cannot be tokenized.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return None
    read = min(len(rows), ROWS_READ)
    tokens = found = 0
    example = ""
    for row in (rows[index] for index in range(read)):
        for message in (message for key in _LOGS for message in row.get(key, ())):
            here = int((message["token_ids"] == unknown).sum())
            found, tokens = found + here, tokens + len(message["token_ids"])
            example = example or (str(message.get("content") or "") if here else "")
    return UnknownTokens(fraction=found / max(tokens, 1), rows=read, example=example)
