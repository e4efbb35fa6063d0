"""The part of a completion that is the answer of a model that thinks first. Lightweight imports only."""

from __future__ import annotations

import unicodedata

_OPENING, _CLOSING = "<think>", "</think>"
_FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols of Unicode that are shown as a space."""


def final_text(completion: str) -> str:
    """The text after the last `</think>`: the answer without the reasoning.

    The opening tag may be missing, because many chat templates write it in the prompt. If a `<think>` is not closed, the
    completion ended while the model was thinking, so there is no answer: the result is empty. A completion without tags is
    returned as it is.
    """
    text = completion.rpartition(_CLOSING)[2]
    return "" if _OPENING in text else text


def visible(text: str) -> str:
    """The text in Unicode form NFC, without invisible characters such as zero-width spaces."""
    composed = unicodedata.normalize("NFC", text)
    return "".join(each for each in composed if unicodedata.category(each) != "Cf" and each not in _FILLERS)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has no letter, digit, punctuation mark or symbol."""
    return not any(unicodedata.category(each)[0] in "LNPS" for each in visible(text))
