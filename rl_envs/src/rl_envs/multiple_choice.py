"""The environment `multiple_choice`: the chosen letter must be the expected one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import DataError, format_value
from rl_envs.math.notation import closed_boxes

_LONGEST = 4000
"""Number of characters at the end of a completion without a box that are searched for an answer."""
_STATED = re.compile(r"\b(?:answer|choice|option)\b[^.\n:=]{0,30}?(?:\bis\b:?|:|=)([^\n]*)", re.IGNORECASE)
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|(?<![^\W_])[*_`$]+|[*_`$]+(?![^\W_])")
_LETTER = re.compile(r"(?:(?:option|choice|answer)\s+)?(?:\(([A-Za-z])\)|([A-Za-z])(?![\w'’]))([\s.:,)]*)", re.IGNORECASE)
_REASON = re.compile(r",?\s*(?:because|since|as)\b", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"(?:or|and|not|but|nor)\b", re.IGNORECASE)


class MultipleChoiceEnvironment(ScorerEnvironment):
    r"""Rewards 1.0 if the completion chooses the expected letter, else 0.0.

    The choice is the content of the last `\boxed{}`, or else what follows the last "answer is" or "Answer:", or else the whole
    text. It is a letter, with or without brackets and the text of its choice, or the exact text of one choice. Several choices
    are none. A row's metadata contains `expected_answer`, a letter, and optionally `choices`, the texts of A, B, C and so on.
    Metrics: `accuracy`, and `answered_frac`, the fraction of completions with a choice.

    Args:
        config: an environment section, a dict of its keys, or None for its defaults.
    """

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Score a choice.

        Raises:
            DataError: the row has no letter as `expected_answer`, or `choices` without a text for it.
        """
        expected, choices = _expected(info)
        chosen = _choice(_statement(text), choices)
        is_right = chosen == expected
        return Score(float(is_right), {"accuracy": is_right, "answered_frac": chosen is not None}, answer=chosen)


def _expected(info: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The expected letter, and the text of each letter, without styles."""
    expected, texts = info.get("expected_answer"), info.get("choices")
    if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise DataError(f"`choices` of `multiple_choice` is {format_value(texts)}: expected a list of texts.")
    choices = dict(zip(string.ascii_uppercase, map(_plain, texts or ()), strict=False))
    letters = choices or string.ascii_uppercase
    if not isinstance(expected, str) or len(expected) != 1 or expected not in letters:
        allowed = f"{min(letters)} to {max(letters)}"
        raise DataError(
            f"`expected_answer` of `multiple_choice` is {format_value(expected)}: expected a letter from {allowed}."
        )
    return expected, choices


def _statement(text: str) -> str:
    """What the completion states as its answer."""
    if boxes := closed_boxes(text):
        between = text[boxes[-2].end : boxes[-1].start].strip("$,. \n\t").casefold() if len(boxes) > 1 else None
        if between in ("", "or", "and") and boxes[-2].content != boxes[-1].content:
            return ""  # several choices
        return boxes[-1].content
    text = _STYLE.sub(r"\1", text[-_LONGEST:])
    stated = _STATED.findall(text)
    return str(stated[-1]) if stated else text


def _choice(statement: str, choices: Mapping[str, str]) -> str | None:
    """The letter that a statement chooses; None if it chooses none, or several."""
    stated = _plain(statement)
    if found := _LETTER.match(stated):
        letter, rest = (found[1] or found[2]).upper(), stated[found.end() :]
        own = choices.get(letter, "")
        after = rest[len(own) :] if _begins_with(rest, own) else rest
        others = [text for text in choices.values() if len(text) > len(rest) - len(after) and _begins_with(rest, text)]
        further, is_new_sentence = after.strip(" ."), "." in found[3] or after.startswith(".")
        is_explained = _REASON.match(after) or (is_new_sentence and not _ALTERNATIVE.match(further))
        if letter in (choices or letter) and not others and (not further or is_explained):
            return letter
    equal = [letter for letter, text in choices.items() if text.casefold() == stated.casefold()]
    return equal[0] if len(equal) == 1 else None


def _begins_with(text: str, beginning: str) -> bool:
    """Whether a text begins with another one, which ends at the end of a word."""
    return text.casefold().startswith(beginning.casefold()) and not text[len(beginning) :][:1].isalnum()


def _plain(text: str) -> str:
    """A text without styles, spaces at its ends and its final point."""
    return " ".join(_STYLE.sub(r"\1", text).split()).strip(" .")
