"""Reads the final answer in a completion and compares two answers; knows no process, no time limit and no tensor.

Math-verify has limits of its own, which use SIGALRM: they fail outside the main thread and cancel other people's alarms, so
they are off here. A comparison may therefore run for ever: make it in a process that `rl_envs.math.grading` can end.
Nothing a model wrote is ever given to `sympy.parse_expr` or `sympify`: they execute Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SHORTEST_NAME = 4
"""Fewer letters than this, without `\\text`, are a product of variables: `ab` equals `ba`, `Rome` does not equal `More`."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one comparison found.

    Attributes:
        right: Whether the answer equals the expected one.
        answer: What was read as the answer; None where there is none.
    """

    right: bool
    answer: str | None


def last_box(completion: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`; the innermost where boxes are nested, None where there is none.

    Takes time linear in the completion's length, whatever it holds.
    """
    found: tuple[int, int] | None = None
    open_braces: list[tuple[bool, int]] = []
    for token in _TOKEN.finditer(completion):
        text = token.group()
        if text == "}" and open_braces:
            is_box, start = open_braces.pop()
            holds_a_box = found is not None and found[0] > start
            if is_box and not holds_a_box:
                found = (start, token.start())
        elif text[-1] == "{" and text != "\\{":
            open_braces.append((text != "{", token.end()))
    return None if found is None else completion[found[0] : found[1]].strip()


def judge(expected: str, completion: str, *, require_box: bool) -> Judgement:
    """Compare the completion's final answer with the expected one.

    Args:
        expected: The right answer: a number, LaTeX with or without dollars or a box, or words.
        completion: What the model wrote; its last box counts, and nothing else where there is one.
        require_box: Without a box there is no answer; else math-verify looks for the last number or expression.
    """
    gold = _bare(expected)
    boxed = last_box(completion)
    if boxed is None and require_box:
        return Judgement(right=False, answer=None)
    if boxed is not None:
        return Judgement(right=boxed != "" and _equal(gold, boxed), answer=boxed or None)
    found = _parse(completion)
    if not found:
        return Judgement(right=False, answer=None)
    right = not _is_words(gold) and verify(_parse_answer(gold), found, timeout_seconds=None)
    return Judgement(right=bool(right), answer=str(found[-1]))


def _equal(gold: str, answer: str) -> bool:
    if _plain(gold) == _plain(answer):
        return True
    if _is_words(gold):
        return _plain(gold).casefold() == _plain(answer).casefold()
    # Gold first: verify is not symmetric (the gold `1<x<2` accepts the answer `(1,2)`, not the other way round).
    return bool(verify(_parse_answer(gold), _parse_answer(answer), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _parse_answer(answer: str) -> list[Any]:
    return _parse(f"\\boxed{{{answer}}}")


def _bare(expected: str) -> str:
    """The expected answer without the box or the dollars around it."""
    boxed = last_box(expected)
    text = (expected if boxed is None else boxed).strip()
    for opening, closing in _MATH_DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 and opening not in inner:
            return inner.strip()
    return text


def _plain(answer: str) -> str:
    r"""The answer without `\text{}`, with single spaces."""
    return " ".join(_TEXT_MACRO.sub(r"\1", answer).split())


def _is_words(gold: str) -> bool:
    plain = _plain(gold)
    if not _WORDS.fullmatch(plain):
        return False
    return _TEXT_MACRO.search(gold) is not None or max(map(len, re.split(r"[ '.-]+", plain))) >= _SHORTEST_NAME
