"""Tokens from which a model cannot learn: unknown to its tokenizer, or without a row in its embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import DataError
from rl_train.data.holdout import row_location

ROWS_READ = 256
"""Rows that are tokenized to measure the fraction: about a second, before a worker starts."""
WARN_ABOVE = 0.01
"""Fraction of unknown tokens above which a run warns."""
_LOGS = ("message_log", "message_log_chosen", "message_log_rejected")
WITHOUT_ROWS = (
    "Use the model's own tokenizer, or give the model rows for them (`model.resize_token_embeddings(len(tokenizer))` of "
    "Transformers, then `save_pretrained`)."
)
"""What to do about tokens that have no row in the model's embedding."""


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
        for message in _messages(row):
            here = int((message["token_ids"] == unknown).sum())
            found, tokens = found + here, tokens + len(message["token_ids"])
            example = example or (str(message.get("content") or "") if here else "")
    return UnknownTokens(fraction=found / max(tokens, 1), rows=read, example=example)


def refuse_tokens_without_rows(
    rows: Sequence[Mapping[str, Any]], model: str, embeddings: int, missing: Mapping[int, str]
) -> None:
    """Check the first `ROWS_READ` rows for tokens that have no row in a model's embedding.

    Args:
        rows: tokenized prompts, conversations or pairs.
        model: name of the model.
        embeddings: number of rows of its embedding.
        missing: tokens without one, by id.

    Raises:
        DataError: a row contains one.
    """
    for number in range(min(len(rows), ROWS_READ) if missing else 0):
        used = {token for message in _messages(rows[number]) for token in message["token_ids"].tolist()}
        if found := sorted(used.intersection(missing)):
            raise DataError(
                f"{row_location(rows, number)} contains the token {missing[found[0]]!r} (id {found[0]}), which has no row in "
                f"the embedding of {model} ({embeddings} rows). {WITHOUT_ROWS}"
            )


def _messages(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (message for key in _LOGS for message in row.get(key, ()))
