"""How much of a dataset's text a tokenizer does not know: a model cannot learn from text that it cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROWS_READ = 256
"""Rows that are tokenized to measure the fraction: about a second, before a worker starts."""
WARN_ABOVE = 0.01
"""Fraction of unknown tokens from which a run warns."""
_LOGS = ("message_log", "message_log_chosen", "message_log_rejected")


@dataclass(frozen=True, kw_only=True)
class UnknownTokens:
    """The unknown tokens of the first rows of a dataset."""

    fraction: float
    """Of all their tokens."""
    rows: int
    """Rows that were read."""
    example: str
    """The text of the first message with an unknown token; empty if there is none."""


def count_unknown_tokens(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> UnknownTokens | None:
    """The unknown tokens of the first `ROWS_READ` rows; None if the tokenizer has no token of its own for unknown text.

    Args:
        rows: tokenized prompts, conversations or pairs.
        tokenizer: theirs. Byte-level tokenizers know every text; some name their end token as the unknown one.

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
