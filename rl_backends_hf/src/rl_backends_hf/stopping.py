"""When a row ends: end tokens, stop strings and limits; knows neither model nor batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS: Final = 6
"""Tokens before the unread ones that are decoded with them, so that spaces and pieces of a character come out right."""
_WINDOW_TOKENS: Final = 24
"""Tokens after which the window that is decoded moves on."""
_MAX_CHARACTER_BYTES: Final = 4
"""Bytes, and so at most tokens, of a character of UTF-8."""


class StopStringScanner:
    """Tells when one of some strings has appeared in a row's completion, reading each token once.

    Text is decoded with special tokens, so a special token's own text can be a stop string. A string is found wherever token
    boundaries fall; the prompt's text does not count.

    Args:
        tokenizer: a tokenizer of Transformers.
        strings: the stop strings.
        prompt: the prompt's tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(len(string) for string in self._strings) - 1
        self._tail = ""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._read_chars = len(self._decode(self._window))
        self._unread = 0

    def push(self, token: int) -> bool:
        """Read one more token; True once a stop string is complete."""
        self._window.append(token)
        self._unread += 1
        text = self._decode(self._window)
        fresh = text[self._read_chars :]
        whole = fresh.rstrip(_REPLACEMENT) if self._unread < _MAX_CHARACTER_BYTES else fresh
        seen = self._tail + whole
        if any(string in seen for string in self._strings):
            return True
        if len(whole) == len(fresh):
            self._advance(seen, len(text))
        return False

    def _advance(self, seen: str, read_chars: int) -> None:
        """All that is decoded so far has been searched; what may begin a stop string is kept."""
        self._tail = seen[-self._overlap :] if self._overlap else ""
        self._read_chars, self._unread = read_chars, 0
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._read_chars = len(self._decode(self._window))

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
