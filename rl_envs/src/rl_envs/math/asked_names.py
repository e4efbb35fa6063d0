"""What a question says about the kind of value, and about the names in its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_envs.math.asked_form import AskedForm

_AS_PERCENT = re.compile(r"\b(?:as|to|into|in) (?:an? )?percent", re.IGNORECASE)
_EXACT = re.compile(r"\bexact|\bsimplif|\brationali[sz]|\bradical|\blogarithm", re.IGNORECASE)
_ROOTS = re.compile(r"\b(?:solutions|roots|zeros|values|solve)\b", re.IGNORECASE)
_PAIR = re.compile(
    r"\b(?:pairs?|points?|coordinates|tuples?|system|vectors?)\b|\b[a-z]\$? and \$?[a-z]\b|\([A-Za-z], ?[A-Za-z]", re.IGNORECASE
)
_FACTOR = re.compile(r"\bfactor", re.IGNORECASE)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[xyz](?![A-Za-z])")
_SINGLE_LETTER = re.compile(r"[A-Za-z]")


def asks_percent_form(form: AskedForm) -> bool:
    """Whether the question asks for a value as a percentage."""
    return _AS_PERCENT.search(form.question) is not None


def asks_exact(form: AskedForm) -> bool:
    """Whether the question asks for an exact value, which no decimal rounds to."""
    return _EXACT.search(form.question) is not None


def asks_roots(form: AskedForm) -> bool:
    """Whether the question asks for values of one variable: `(-3, 4)` is not the solutions -3 and 4."""
    return _ROOTS.search(form.question) is not None and _PAIR.search(form.question) is None


def asks_factors(form: AskedForm) -> bool:
    """Whether the question asks to factor."""
    return _FACTOR.search(form.question) is not None


def knows_names(parts: Sequence[str], form: AskedForm) -> bool:
    """Whether the question has the names of all values: not `x = 2, y = 3` for two solutions of one variable."""
    names = {part.partition("=")[0].partition("_")[0].strip() for part in parts}
    patterns = [rf"(?<![A-Za-z]){re.escape(name)}(?![a-z])" for name in names]
    return not form.question or len(names) == 1 or all(re.search(pattern, form.question) for pattern in patterns)


def is_other_variable(name: str, form: AskedForm) -> bool:
    """Whether the question asks for one variable or has one, and this is the name of another one; a slope is not `y`."""
    name, target = name.strip(), (form.target or "").strip()
    if not _SINGLE_LETTER.fullmatch(name):
        return False
    variables = set(_VARIABLE.findall(form.question))
    is_foreign = name in "xyz" and variables and (name not in variables or "slope" in form.question)
    return bool(is_foreign) or (_SINGLE_LETTER.fullmatch(target) is not None and target != name)


def is_of_question(fraction: str, form: AskedForm) -> bool:
    """Whether the question has both numbers of a fraction."""
    return set(re.findall(r"\d+", fraction)) <= set(re.findall(r"\d+", form.question))
