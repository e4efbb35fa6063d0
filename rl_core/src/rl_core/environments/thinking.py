"""The part of a completion that is the answer of a model that thinks first. Lightweight imports only."""

from __future__ import annotations

_OPENING, _CLOSING = "<think>", "</think>"


def final_text(completion: str) -> str:
    """The text after the last `</think>`: the answer without the reasoning.

    The opening tag may be missing, because many chat templates write it in the prompt. If a `<think>` is not closed, the
    completion ended while the model was thinking, so there is no answer: the result is empty. A completion without tags is
    returned as it is.
    """
    text = completion.rpartition(_CLOSING)[2]
    return "" if _OPENING in text else text
