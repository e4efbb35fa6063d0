"""The visible characters of a completion. Lightweight imports only."""

from __future__ import annotations

import unicodedata

_FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols of Unicode that are shown as a space."""


def visible(text: str) -> str:
    """The text in Unicode form NFC, without invisible characters such as zero-width spaces."""
    composed = unicodedata.normalize("NFC", text)
    return "".join(each for each in composed if unicodedata.category(each) != "Cf" and each not in _FILLERS)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has no letter, digit, punctuation mark or symbol."""
    return not any(unicodedata.category(each)[0] in "LNPS" for each in visible(text))


def read_tagged(text: str, tag: str) -> str | None:
    """The text in the last pair of tags `<tag>` and `</tag>`; None if there is no pair."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    before = text.rpartition(closing)[0].rpartition(opening)  # a search for pairs could take quadratic time
    return before[2].partition(closing)[0] if before[1] else None
