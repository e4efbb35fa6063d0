"""The environments `multiple_choice` and `short_answer`: what a completion states must be the expected letter or words."""

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
_PUNCTUATION = str.maketrans(dict.fromkeys(f"{string.punctuation}‘’´`", " "))
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


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


class ShortAnswerEnvironment(ScorerEnvironment):
    r"""Rewards 1.0 if the completion states the expected answer or one of its aliases, else 0.0.

    The answer is the content of the last `\boxed{}`, or else what follows the last "answer is" or "Answer:", or else the whole
    text. It is compared as a whole, after the normalization of TriviaQA (see `normalized`). A row's metadata contains
    `expected_answer`, and optionally `aliases`, a list of other accepted answers. Metrics: `accuracy`, and `answered_frac`.

    Args:
        config: an environment section, a dict of its keys, or None for its defaults.
    """

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Score an answer.

        Raises:
            DataError: the row has no accepted answer with a word, or its `aliases` are not texts.
        """
        expected, aliases = info.get("expected_answer"), info.get("aliases") or []
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise DataError(f"`aliases` of `short_answer` is {format_value(aliases)}: expected a list of texts.")
        accepted = {normalized(str(one)) for one in (expected, *aliases) if one is not None} - {""}
        if not accepted:
            raise DataError(f"`expected_answer` of `short_answer` is {format_value(expected)}: expected a text with a word.")
        stated = normalized(_plain(_statement(text))) or None
        is_right = stated in accepted
        return Score(float(is_right), {"accuracy": is_right, "answered_frac": stated is not None}, answer=stated)


def normalized(text: str) -> str:
    """A text in lower case without punctuation, the articles a, an and the, and further spaces.

    This is the normalization of the exact match of TriviaQA (Joshi et al. 2017, https://arxiv.org/abs/1705.03551), as published
    with its data (https://github.com/mandarjoshi90/triviaqa).
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


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
    end = _STYLE.sub(r"\1", text[-_LONGEST:])
    if stated := _STATED.findall(end):
        return str(stated[-1])
    return end if len(text) <= _LONGEST else ""


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
