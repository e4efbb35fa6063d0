r"""Notations that belong to some questions only: residues, numerals with a base, and forms that a question asks for."""

from __future__ import annotations

import re
from typing import Any

from rl_envs.math.asked_form import POLAR_FORM, AskedForm
from rl_envs.math.formulas import formula_of
from rl_envs.math.notation import plain
from rl_envs.math.number_literals import read_numeral

_CONGRUENT = re.compile(
    r"(?:(.*?)\\equiv(?![A-Za-z]))?(.*?)(?:\\pmod\s*\{?\s*(\d+)\s*\}?|\(\s*(?:\\text\{\s*mod\s*\}|\\?mod(?![a-z]))\s*(\d+)\s*\))"
)
_VARIABLE = re.compile(r"\s*[A-Za-z]\s*")
_PREFIXED = re.compile(r"0([xbo])([0-9A-F]+)", re.IGNORECASE)
_PREFIXES = {"x": 16, "b": 2, "o": 8}
_ORDER = r"[<>\u2264\u2265]|\\(?:le|ge|lt|gt)(?:q|qslant)?(?![A-Za-z])"
_FRACTION = r"(?:\\[dtc]?frac|\d+\s*/)"
_FORMS = [
    (re.compile(asked, re.IGNORECASE), re.compile(written))
    for asked, written in (
        (
            POLAR_FORM,
            r"(?<![A-Za-z\\])e\s*\^|\\(?:exp|cos|angle)(?![A-Za-z])|(?<![A-Za-z])cis(?![A-Za-z])",
        ),
        (r"\bscientific notation\b|\bstandard form\b", r"10\s*(?:\^|\*\*)|\d\s*(?:\\\w+\{)?[eE]"),
        (r"\b(?:ordinary|standard) (?:notation|form)\b", r"^(?!.*10\s*\^)"),
        (
            r"(?<!or )(?<!or a )\bdecimal\b(?! or\b)|\bround(?:ed|ing)?(?: \S+){0,6} to\b",
            rf"^(?:.*=)?(?!.*%)(?:.*\.\d|(?!.*{_FRACTION}))",
        ),
        (r"\b(?:as|into|to|in|give|write) (?:an? |the )?(?:[a-z]+ ){0,2}fractions?\b(?! or\b)|\bcommon fraction\b", _FRACTION),
        (r"\bimproper fraction\b", rf"(?:^|=)[\s+-]*{_FRACTION}"),
        (r"\bmixed (?:number|numeral|fraction)s?\b", r"\d\s*(?:\+\s*)?\\[dtc]?frac|\d\s+\d+\s*/|\d\s*\+\s*\d+\s*/"),
        (r"\binterval notation\b", rf"^(?!.*(?:{_ORDER}|setminus)).*[(\[\]].*,.*[)\]\[]"),
        (r"\binterval notation\b", r"\\cup|\bor\b|\u222a"),
        (r"\b(?:as|using) an? (?:compound )?inequality\b|\binequality (?:notation|form)\b", _ORDER),
        (r"\bslope[- ]intercept form\b", r"(?:^|\{)\s*(?:y|f\s*\(x\))\s*=(?!.*\([^)]*x)"),
        (r"\bpoint[- ]slope form\b", r"\(\s*x[^=]*$|^[^=]*\(\s*x"),
        (r"\bstandard form\b", r"\)\s*\^"),
        (r"\b(?:standard|general) form\b", r"x[^=]*y|y[^=]*x"),
        (r"\b(?:find|write|give|determine|state|what is) (?:an?|the) equation\b", "="),
        (r"\b(?:a|one) single log", r"^(?!.*(?:ln|log).*(?:ln|log))"),
        (r"\bin words\b", "[A-Za-z]{3}"),
        (r"\bin \w+ and (?:minutes|seconds|inches|ounces|cents|days|months)\b", r"\d.*[A-Za-z].*\d"),
    )
]
"""What a question asks for, and what an answer in this form contains."""
_LONGEST = 1000


def lacks_form(expected: str, answer: str, form: AskedForm) -> bool:
    """Whether the question asks for a form, such as interval notation, that the expected answer has but not the model's."""
    return any(
        asked.search(form.question) and written.search(expected) and not written.search(answer[:_LONGEST])
        for asked, written in _FORMS
    )


def is_same_numeral(expected: str, answer: str, form: AskedForm) -> bool:
    r"""Whether an answer with its base (`FF_{16}`, `0xFF`) is the expected numeral in the base that the question names."""
    if form.base is None:
        return False
    prefixed = _PREFIXED.fullmatch(plain(answer))
    if prefixed is not None:
        answer = f"{prefixed.group(2).upper()}_{_PREFIXES[prefixed.group(1).lower()]}"
    given = read_numeral(answer)
    return given is not None and given == read_numeral(f"{plain(expected)}_{form.base}")


def without_modulus(answer: str, form: AskedForm) -> str:
    r"""The residue 2 of `2 \pmod 7` or `2^{10} \equiv 2 \pmod 7`, if it is true and the question names this modulus."""
    match = _CONGRUENT.fullmatch(answer)
    if match is None or form.modulus is None or int(match.group(3) or match.group(4)) != form.modulus:
        return answer
    left, residue = match.group(1), match.group(2).strip()
    if left is None or _VARIABLE.fullmatch(left):
        return residue
    trees = formula_of(left), formula_of(residue)
    values: list[Any] = [None if tree is None else tree.doit() for tree in trees]
    is_true = all(getattr(value, "is_Integer", False) for value in values) and (values[0] - values[1]) % form.modulus == 0
    return residue if is_true else answer
