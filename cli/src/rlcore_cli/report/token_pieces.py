"""Splits a completion into the texts of its tokens, without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PART_OF_A_CHARACTER = "\ufffd"


def token_pieces(tokens: Sequence[int], completion: str, texts: Mapping[int, str]) -> list[tuple[str, bool]] | None:
    """The text of each token and whether it is part of the completion; None if texts are missing.

    If several tokens form one character, the first gets the text of all and the others get "". Tokens that are not in the
    completion, such as the end of sequence, have their own text and False. If the texts do not add up to the completion, each
    token has its own text.

    Args:
        tokens: [T] ids.
        completion: The decoded text, without special tokens.
        texts: The text of each single id.
    """
    if any(token not in texts for token in tokens):
        return None
    token_texts = [texts[token] for token in tokens]
    pieces: list[tuple[str, bool]] = []
    run_began: int | None = None
    at = 0
    for index, text in enumerate(token_texts):
        if PART_OF_A_CHARACTER in text:
            run_began = index if run_began is None else run_began
            pieces.append(("", True))
            continue
        piece = _find(text, completion, at, is_next=run_began is None)
        if piece is None:
            pieces.append((text, False))
            continue
        start, text = piece
        if run_began is not None:
            pieces[run_began] = (completion[at:start], True)
            run_began = None
        pieces.append((text, True))
        at = start + len(text)
    if run_began is not None:
        pieces[run_began] = (completion[at:], True)
    if "".join(text for text, is_in in pieces if is_in) != completion:
        return [(text, True) for text in token_texts]
    return pieces


def _find(text: str, completion: str, at: int, *, is_next: bool) -> tuple[int, str] | None:
    # Some tokenizers drop the leading space of a word that is decoded alone.
    for candidate in (text, f" {text}"):
        if is_next and completion.startswith(candidate, at):
            return at, candidate
        if not is_next and text:
            start = completion.find(candidate, at)
            if start >= 0:
                return start, candidate
    return None
