"""Tokens from which a model cannot learn: unknown to its tokenizer, or without a row in its embedding."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_train.data.holdout import row_location

_log = logging.getLogger("rlcore")
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


def unknown_fraction(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> float | None:
    """Log the fraction of unknown tokens in the first `ROWS_READ` rows of the training data, and warn if it is high.

    Args:
        rows: tokenized prompts, conversations or pairs.
        tokenizer: their tokenizer. Byte-level tokenizers cover all text; some use their end token as unknown token.

    Returns:
        The fraction; None if the tokenizer has no separate unknown token.

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
    fraction = found / max(tokens, 1)
    first = "the first training row" if read == 1 else f"the first {read} training rows"
    _log.info("%.2f %% of the tokens of %s are unknown", 100 * fraction, first)
    if fraction > WARN_ABOVE:
        _log.warning(
            "%.1f %% of the tokens of %s are %s, the tokenizer's unknown token; the first such "
            "message is %r. The model cannot learn from this text. Use a prompt (`data.prompt`) and data that the "
            "tokenizer covers, or a model with another tokenizer.",
            100 * fraction,
            first,
            tokenizer.unk_token,
            example[:80],
        )
    return fraction


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
