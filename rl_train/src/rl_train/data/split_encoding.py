"""Encodes a text with token boundaries at given characters, as when a model starts or stops sampling there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.data.conversation_tokens import decode, encode
from rl_core.errors import DataError


def encode_pieces(text: str, borders: Sequence[int], tokenizer: Any) -> list[list[int]]:
    """The token ids of the pieces between the boundaries; concatenated, they are the whole text.

    If the tokenizer keeps a boundary, the pieces are those of the text encoded as a whole. If it merges the characters around a
    boundary into one token (for example, white space at the beginning of an answer), the two sides are encoded separately, as
    when a model continues a prompt.

    Args:
        text: The text.
        borders: Positions in the text, in characters, ascending.
        tokenizer: A Transformers tokenizer.

    Raises:
        DataError: The tokenizer cannot encode the text after a boundary separately without changing it.
    """
    whole = encode(text, tokenizer)
    counts: list[int] = []
    for number, border in enumerate(borders):
        before = encode(text[:border], tokenizer)
        if whole[: len(before)] != before:
            left, right = text[:border], text[border:]
            pieces = encode_pieces(left, borders[:number], tokenizer)
            pieces += encode_pieces(right, [later - border for later in borders[number + 1 :]], tokenizer)
            _check_joined(pieces, whole, left, right, tokenizer)
            return pieces
        counts.append(len(before))
    return [whole[start:end] for start, end in zip([0, *counts], [*counts, len(whole)], strict=True)]


def _check_joined(pieces: list[list[int]], whole: list[int], left: str, right: str, tokenizer: Any) -> None:
    joined = [token for piece in pieces for token in piece]
    if decode(tokenizer, whole) == left + right:
        is_changed = decode(tokenizer, joined) != left + right
    else:
        # A decoder that does not restore the whole text proves nothing; a word prefix in the middle of a text is a change.
        first = tokenizer.convert_ids_to_tokens(encode(right, tokenizer)[:1])
        is_changed = bool(first) and first[0].startswith("\u2581") and not right[:1].isspace()
    if is_changed:
        raise DataError(
            f"the texts {left[-20:]!r} and {right[:20]!r} have different tokens together and separately, and this tokenizer "
            "adds characters to the second one if it is encoded separately, so the boundary between prompt and answer "
            "cannot be kept. Strip the white space around it, or use a template whose header this tokenizer does not merge"
        )
