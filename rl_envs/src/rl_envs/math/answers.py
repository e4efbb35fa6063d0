r"""Reads the final answer in a completion and grades it.

The time limits of math-verify use SIGALRM, which fails outside the main thread and cancels other alarms, so they are
disabled. A comparison may therefore run forever, and `rl_envs.math.environment` runs this module in a process that it can kill:
`python -m rl_envs.math.answers`. Does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rl_envs.grading_worker import serve
from rl_envs.math.asked import ANY_FORM, AskedForm
from rl_envs.math.comparison import Comparison, compare
from rl_envs.math.notation import closed_boxes, last_box, without_delimiters
from rl_envs.math.words import is_words

_LIST_MARKER = re.compile(
    r"^[ \t]*(?:[-*#>]+[ \t]+)*(?:\(?\d{1,3}[.):](?=\s)(?!\s*\Z)[ \t]*|step[ \t]+\d+[.:)]?)", re.MULTILINE | re.IGNORECASE
)
_STATED = re.compile(r"####|(?:\banswer|\bresult|\bsolution)\b[^.\n=:]{0,30}?(?:\bis\b|:|=)(?![.\d]|\s*not\b)", re.IGNORECASE)
_SPAN = r"\$\$[^$]{1,400}\$\$|(?<![\\$])\$[^$\n]{1,400}\$|\\\([^\n]{1,400}?\\\)|\\\[.{1,400}?\\\]"
_NUMBER = r"(?:(?<![\w)}])[+-]\s?)?\\?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:\s?\\?%)?"
_TERM = rf"(?:\(\s*{_NUMBER}\s*\)|{_NUMBER}|\\d?frac\s*\{{[^{{}}]{{1,40}}\}}\s*\{{[^{{}}]{{1,40}}\}})"
_CHAIN = rf"{_TERM}(?:\s*(?:\*\*|[-+*/^=×÷−:]|\\times|\\cdot|\\div|x(?=\s*\d))\s*{_TERM}){{0,30}}"
_CANDIDATE = re.compile(rf"(?s:{_SPAN})|(?<![\w.\\{{]){_CHAIN}(?![\w}}])")
_CHOICE = r"[^.,;\n\d]{0,30}?,?\s*\bor\b(?:\s+[a-z]+){0,2}\s*"
_OR = re.compile(_CHOICE, re.IGNORECASE)
_OR_AND_COMMA = re.compile(rf"\s*,?\s*and\s+|\s*,\s*|{_CHOICE}", re.IGNORECASE)
_NEGATION = re.compile(r"(?:\bnot|n['\u2019]t|\u2260|!=|\\neq?)\s*(?:be|equal(?:\s+to)?)?\s*$", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_GLUED = re.compile(r"(?<![\w.,\\{])\d[\d.,]*(?!(?:st|nd|rd|th)\b)[^\W\d_]+")
"""A number with letters, such as 120lbs or 2x."""
_TRAILING = re.compile(r"[.,;:!?*)\s]+$")
_OR_IN_DELIMITERS = re.compile(r"[\s$,]*\bor\b[\s$]*(?:(?:maybe|perhaps|even|else)\b[\s$]*)?", re.IGNORECASE)
"""Between two boxes."""
_NEGATION_LENGTH = 20
LONGEST_UNBOXED = 4000
"""Number of characters at the end that are searched for an answer without a box."""


@dataclass(frozen=True, kw_only=True)
class AnswerGrade:
    """How one answer was graded.

    Attributes:
        comparison: How the answer compares with the expected one; None if there is no answer.
        answer: What was read as the answer; None if there is none.
        boxed: Whether it was in a box.
    """

    comparison: Comparison | None
    answer: str | None
    boxed: bool

    @property
    def is_correct(self) -> bool:
        """Whether the answer equals the expected one."""
        return self.comparison is Comparison.EQUAL


def grade_answer(
    expected: str,
    completion: str,
    *,
    require_box: bool,
    allow_unevaluated: bool = False,
    form: AskedForm = ANY_FORM,
) -> AnswerGrade:
    """Grade the completion's final answer.

    Args:
        expected: The expected answer: a number, LaTeX with or without dollars or a box, or words.
        completion: The model's text. If it has a box, the last box is the answer.
        require_box: Whether a completion without a box has no answer; otherwise see `unboxed_answer`.
        allow_unevaluated: Whether to accept unevaluated arithmetic, such as `3 + 2` for 5.
        form: What the question says about the form of the answer.
    """
    gold = last_box(expected)
    gold = without_delimiters(expected if gold is None else gold)
    answer = boxed = boxed_answer(completion)
    if boxed is None and not require_box:
        answer = unboxed_answer(completion, words=is_words(gold))
    if not answer:
        return AnswerGrade(comparison=None, answer=None, boxed=boxed is not None)
    comparison = compare(gold, answer, allow_unevaluated=allow_unevaluated, form=form)
    return AnswerGrade(comparison=comparison, answer=answer, boxed=boxed is not None)


def boxed_answer(completion: str) -> str | None:
    r"""The content of the last box; None without a box, and empty if the box is negated ("not $\boxed{5}$").

    Alternatives belong to the answer, as in `unboxed_answer`: in "\boxed{5} or \boxed{6}" it is `5 \text{ or } 6`.
    """
    boxes = closed_boxes(completion)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and _OR_IN_DELIMITERS.fullmatch(completion, boxes[first - 1].end, boxes[first].start):
        first -= 1
    start = boxes[first].start
    if _NEGATION.search(completion[max(0, start - _NEGATION_LENGTH) : start].rstrip("$( \\")):
        return ""
    return r" \text{ or } ".join(box.content for box in boxes[first:])


def unboxed_answer(completion: str, *, words: bool) -> str | None:
    r"""The final answer of a completion without a box, as written; None if there is none.

    It follows the last "answer is", "answer:" or `####`; if a number there cannot be read, as in "120glbs", it is the whole
    statement, never another number. Without these, it is the last formula in dollars or the last number,
    including the arithmetic that it is part of: in "3 + 2 appliances" the answer is `3 + 2`. Alternatives belong to the answer,
    so a guess at several values equals none of them: in "5 or 6" it is `5 or 6`. "not 5" is not an answer. Numbers of lists and
    steps ("2. Rewrite the equation") are ignored.

    Args:
        completion: The model's text.
        words: Whether an answer in words is expected; it is read only after a phrase such as "answer is".
    """
    text = _LIST_MARKER.sub(" ", completion[-LONGEST_UNBOXED:])
    stated = list(_STATED.finditer(text))
    if stated:
        statement = text[stated[-1].end() :].strip().partition("\n")[0].strip(" *:")
        candidate = _CANDIDATE.search(statement)
        before = statement if candidate is None else statement[: candidate.start()]
        if words or _DIGIT.search(before):  # such as 120lbs, which may be readable as a whole; another number is not the answer
            return _TRAILING.sub("", statement.split(". ")[0]) or None
        if candidate is not None:
            return _first_answer(statement)
    return None if words else _last_answer(text)


def _is_negated(text: str, found: re.Match[str]) -> bool:
    return _NEGATION.search(text, max(0, found.start() - _NEGATION_LENGTH), found.start()) is not None


def _first_answer(statement: str) -> str | None:
    """The first formula or number that is not negated, with its alternatives."""
    candidates = [match for match in _CANDIDATE.finditer(statement) if not _is_negated(statement, match)]
    if not candidates:
        return None
    last = candidates[0]
    for match in candidates[1:]:
        if not _OR_AND_COMMA.fullmatch(statement, last.end(), match.start()):
            break
        last = match
    return without_delimiters(statement[candidates[0].start() : last.end()])


def _last_answer(text: str) -> str | None:
    """The last formula or number, with its alternatives; None if it is negated, or if a number with letters follows."""
    candidates = list(_CANDIDATE.finditer(text))
    if not candidates or _is_negated(text, candidates[-1]) or _GLUED.search(text, candidates[-1].end()):
        return None
    first = candidates[-1]
    for match in reversed(candidates[:-1]):
        if not _OR.fullmatch(text, match.end(), first.start()):
            break
        first = match
    return without_delimiters(text[first.start() : candidates[-1].end()])


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    grade = grade_answer(
        request["expected"],
        request["completion"],
        require_box=request["require_box"],
        allow_unevaluated=request["allow_unevaluated"],
        form=AskedForm(**request["form"]),
    )
    comparison = None if grade.comparison is None else grade.comparison.name
    return {"comparison": comparison, "answer": grade.answer, "boxed": grade.boxed}


if __name__ == "__main__":
    # The first comparison loads the parser, which takes longer than any other.
    serve(_answer, warm_up=lambda: grade_answer("1", "\\boxed{1}", require_box=True))
