"""Detects stop strings in a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rl_core.data.conversation_tokens import decode

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS: Final = 6
"""Number of preceding tokens decoded with the unread ones, so that spaces and partial characters are decoded correctly."""
_WINDOW_TOKENS: Final = 24
"""Number of tokens after which the decoded window is shortened."""
_MAX_CHARACTER_BYTES: Final = 4
"""Maximum number of bytes, and thus of tokens, of a UTF-8 character."""


class StopStringScanner:
    """Detects when a stop string has appeared in a row's completion, reading each token once.

    Text is decoded with special tokens, so a special token's text can be a stop string. Strings are found across token
    boundaries; the prompt's text does not count.

    Args:
        tokenizer: a Transformers tokenizer.
        strings: the stop strings.
        prompt: the prompt's tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(len(string) for string in self._strings) - 1
        self._tail = ""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._read_chars = len(decode(self._tokenizer, self._window))
        self._unread = 0

    def push(self, token: int) -> bool:
        """Read one more token; returns whether a stop string is complete."""
        self._window.append(token)
        self._unread += 1
        text = decode(self._tokenizer, self._window)
        fresh = text[self._read_chars :]
        whole = fresh.rstrip(_REPLACEMENT) if self._unread < _MAX_CHARACTER_BYTES else fresh
        searched = self._tail + whole
        if any(string in searched for string in self._strings):
            return True
        if len(whole) == len(fresh):
            self._advance(searched, len(text))
        return False

    def _advance(self, text: str, read_chars: int) -> None:
        """Mark the decoded text as searched; keep the end that may start a stop string."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        self._read_chars, self._unread = read_chars, 0
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._read_chars = len(decode(self._tokenizer, self._window))
