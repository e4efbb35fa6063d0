"""Reads the score from a judge's reply."""

from __future__ import annotations

import re

from rl_core.environments.scorer import final_text


def read_score(reply: str, pattern: str, *, answer: str, lowest: float, highest: float) -> float | None:
    """The score that the reply states; None if it states none, or one that cannot be trusted.

    A score is not trusted if it is out of range, if its scale does not end at `highest` ("10/100" for a scale up to 10), or if
    the answer contains the same words: the reply may quote them.

    Args:
        reply: what the judge wrote.
        pattern: regular expression whose first group is the score and whose second, if any, is the end of its scale; the last
            match counts.
        answer: what the judge read.
        lowest: worst score.
        highest: best score.
    """
    matches = list(re.finditer(pattern, final_text(reply)))
    if not matches:
        return None
    groups = matches[-1].groups()
    try:
        score, *scale = (float(group) for group in groups if group is not None)
    except ValueError:
        return None
    is_trusted = lowest <= score <= highest and all(end == highest for end in scale)
    return score if is_trusted and not _is_quoted(matches[-1].group(), answer) else None


def _is_quoted(statement: str, answer: str) -> bool:
    """Whether a statement with a word is in the answer; a bare number could be anything."""
    words = _words(statement)
    return any(each.isalpha() for each in words) and f" {words} " in f" {_words(answer)} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\d+(?:\.\d+)?|\w+", text.casefold()))
