"""The text of sampled tokens: of a whole completion, while it is sampled, and of single tokens with their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from rl_core.data.tokenizer import decode
from rl_train.data.special_tokens import decode_answers, hidden_tokens

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token of one byte, in vocabularies that write unknown characters as bytes."""
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF_LETTER: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The byte of each letter in byte-level vocabularies, as those of GPT-2 and its successors."""
_CONTEXT_TOKENS: Final = 8
"""Number of tokens that are decoded again with each new one, so that spaces and characters between tokens are correct."""
_WINDOW_TOKENS: Final = 64
"""Number of tokens after which the decoded window is shortened, so that long completions are not decoded from their start."""


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a completion, without the special tokens that are hidden."""
    [text] = decode_answers(tokenizer, [token_ids])
    return text


def completion_text(tokenizer: Any, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
    """The text of a finished completion, without hidden special tokens and without the stop string that ended it."""
    return cut_at_stop(decoded(tokenizer, token_ids), stop_strings)


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [found for stop in stop_strings if (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def cut_at_possible_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string, or before an end that may be the beginning of one."""
    text = cut_at_stop(text, stop_strings)
    return text[: min((partial_start(text, stop) for stop in stop_strings), default=len(text))]


def partial_start(text: str, string: str) -> int:
    """Where an end of the text begins that is a beginning of `string` but not all of it; the text's length if none does."""
    first = max(len(text) - len(string) + 1, 0)
    return next((start for start in range(first, len(text)) if string.startswith(text[start:])), len(text))


class IncrementalText:
    """Decodes one completion as its tokens arrive: only characters that later tokens cannot change.

    Not with `tokenizers.decoders.DecodeStream`: one invalid byte token changes the text of those before it, so it raises for
    every fourth list of random ids, and for some others it returns a text that differs from that of all tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer)
        self._before = ""
        self._start = 0

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens so far, up to the first character that may still change.

        Args:
            token_ids: all sampled tokens so far; each call has the tokens of the call before it and perhaps more.
        """
        end = len(token_ids)
        # One invalid byte turns its whole run of byte tokens into replacement characters, so a run is read when it has ended.
        # Hidden tokens do not end it: they are removed before bytes are joined.
        while end > self._start and self._continues_run(token_ids[end - 1]):
            end -= 1
        text = self._before + decoded(self._tokenizer, token_ids[self._start : end])
        if end - self._start > _WINDOW_TOKENS:
            self._shorten(token_ids[:end], text)
        return text.rstrip(_REPLACEMENT)

    def _shorten(self, token_ids: Sequence[int], text: str) -> None:
        """Decode only the last tokens from now on, if they have the same text alone as behind the others."""
        start = len(token_ids) - _CONTEXT_TOKENS
        context = decoded(self._tokenizer, token_ids[start:])
        if context.strip(_REPLACEMENT) and text.endswith(context) and not self._continues_run(token_ids[start]):
            self._before, self._start = text[: -len(context)], start

    def _continues_run(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return token in self._hidden or (isinstance(name, str) and _BYTE.fullmatch(name) is not None)


def token_texts(tokenizer: Any, token_ids: Sequence[int], *, before: Sequence[int] = ()) -> list[str]:
    """The text of each token, with the space before a word; a part of a character is a replacement character.

    `before` are the tokens of the completion before them: the first word of a completion has no space in many vocabularies.
    """
    [*texts] = (text for [text] in candidate_texts(tokenizer, [[token] for token in token_ids], token_ids, before=before))
    return texts


def candidate_texts(
    tokenizer: Any, candidates: Sequence[Sequence[int]], token_ids: Sequence[int], *, before: Sequence[int] = ()
) -> list[list[str]]:
    """The texts of tokens that could have been sampled at the position of each sampled token, as `token_texts`."""
    hidden = hidden_tokens(tokenizer)
    begins = all(token in hidden for token in before)
    texts = []
    for tokens, sampled in zip(candidates, token_ids, strict=True):
        text_of = _first_text if begins else _inner_text
        texts.append([text_of(tokenizer, token) for token in tokens])
        begins = begins and sampled in hidden
    return texts


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """The bytes of a token with this text, which may be a part of a character; None if the vocabulary does not show them."""
    if _REPLACEMENT not in text:
        return list(text.encode())
    name = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str):
        return None
    if _BYTE.fullmatch(name):
        return [int(name[3:5], 16)]
    if _REPLACEMENT in name:
        return list(text.encode())
    return [_BYTE_OF_LETTER[letter] for letter in name] if all(letter in _BYTE_OF_LETTER for letter in name) else None


@lru_cache(maxsize=2**16)
def _first_text(tokenizer: Any, token: int) -> str:
    return decode(tokenizer, [token])


@lru_cache(maxsize=2**16)
def _inner_text(tokenizer: Any, token: int) -> str:
    """The text that a token adds to one before it: decoders drop the space of the first word, also of a single token."""
    first = _first_text(tokenizer, token)
    twice = decode(tokenizer, [token, token])
    return twice[len(first) :] if _REPLACEMENT not in first and twice.startswith(first) else first
