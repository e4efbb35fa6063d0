"""Which form an answer must have, or may have, according to the question. Lightweight imports only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_envs.math.asked_units import units_of_answer
from rl_envs.math.number_literals import REDUCTION, reducible

_COUNT = r"(?:two|three|four|five|six|\d+)"
_IN_ORDER = re.compile(
    rf"\bnext {_COUNT}\b|\bfirst {_COUNT} (?:terms|numbers|members)\b|\bin (?:\w+ )?order\b|\bfrom (?:the )?(?:smallest|least"
    r"|lowest|largest|greatest|highest)\b|\bsort(?:ed)?\b|\barrange\b|\brespectively\b",
    re.IGNORECASE,
)
_INTERVAL = re.compile(
    r"\binterval|\bdomain\b|\brange of\b|\bsolution set\b|\binequalit|[<>\u2264\u2265]|\\(?:le|ge|lt|gt)q?(?![a-z])",
    re.IGNORECASE,
)
_PAIR = re.compile(r"\bpairs?\b|\bpoints?\b|\bcoordinates?\b|\btuples?\b|\([A-Za-z], ?[A-Za-z]", re.IGNORECASE)
_PRIMES = re.compile(r"\bprime factor|\bproduct of (?:its |the )?prime|\bprime powers?\b|\bpowers of primes\b", re.IGNORECASE)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12}
_BASE = re.compile(
    r"\b(?:in|to|into|as|the)(?: an?)? (?:base[ ~-]?\$?(\d{1,2}|[a-z]+)\b|(binary|octal|hexadecimal)\b)", re.IGNORECASE
)
_BASE_NAMES = {"binary": 2, "octal": 8, "hexadecimal": 16}
_MODULUS = re.compile(r"\b(?:divided by|mod(?:ulo)?\b|\\[bp]?mod\s*\{?)\s*\$?(\d+)", re.IGNORECASE)
POLAR_FORM = r"\b(?:polar|exponential) form\b"
_TARGET = re.compile(r"\b(?:find|what is|compute|evaluate|determine) (?:the value of )?\$([^$=]+)\$", re.IGNORECASE)
_CHOICE = re.compile(r"\(([A-Z])\)\s*((?:(?!\([A-Z]\))[^\n]){1,80})")
_WORD = re.compile(r"[A-Za-z]{3}")
_KIND = re.compile(r"\b(?:(?:which|what)(?: (?:kind|type|sort) of)?|(?:is|does) (?:the|this)) ([a-z]{3,})\b", re.IGNORECASE)
_FORMULA = re.compile(r"(?<![A-Za-z])[A-Za-z]\s*[\^+*/(]|[\d)+*/]\s*[A-Za-z](?![A-Za-z])|\\frac|(?<![A-Za-z])[A-Za-z]\s-\s")
_ASKS_FORM = re.compile(
    r"\bfactor|\bexpand|\bproduct|\bsimplif|\bform\b|\bexpress|\bwrite\b|\brewrite|\bsquare\b|\bpolynomial", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class AskedForm:
    """What a question says about the form of its answer; the defaults are those of an unknown question."""

    lowest_terms: bool = False
    """Whether `2/4` for 1/2 is unevaluated, too."""
    units: tuple[str, ...] | None = None
    """Units that the answer may have although the expected one has none; None for any known unit."""
    in_order: bool = False
    """Whether the elements of a bare list have an order: `64, 32, 16` is not `16, 32, 64`."""
    is_interval: bool = False
    """Whether a pair in brackets is an interval: `1, 4` is not `(1, 4)`."""
    primes: bool = False
    """Whether a product of primes must remain one: 72 is not `2^3 \\cdot 3^2`."""
    is_free: bool = False
    """Whether any form of a polynomial is an answer, because the question has no formula that an answer could repeat."""
    base: int | None = None
    """The base of an answer that is written without it."""
    modulus: int | None = None
    """The modulus that an answer may repeat: `2 \\pmod 7` for 2."""
    is_polar: bool = False
    """Whether a complex number must have its modulus and its argument."""
    kind: str | None = None
    """What kind of thing a name is, which an answer may add: `the planet Mercury` for `Mercury`."""
    target: str | None = None
    """The formula whose value the question asks for, which an answer may repeat: `m + n = 113` for 113."""
    question: str = ""
    """The question itself, on one line."""
    choices: tuple[tuple[str, str], ...] = ()
    """Letter and text of each choice that the question lists as `(A) ... (B) ...`."""


ANY_FORM = AskedForm()
"""The form of an answer to an unknown question."""


def asked_form(question: str) -> AskedForm:
    """What a question says about the form of its answer."""
    base, kind = list(_BASE.finditer(question)), _KIND.search(question)
    return AskedForm(
        lowest_terms=needs_lowest_terms(question),
        units=units_of_answer(question),
        in_order=_IN_ORDER.search(question) is not None,
        is_interval=_INTERVAL.search(question) is not None and _PAIR.search(question) is None,
        primes=_PRIMES.search(question) is not None,
        is_free=_WORD.search(question) is not None and not _FORMULA.search(question) and not _ASKS_FORM.search(question),
        base=_base(base[-1]) if base else None,
        modulus=int(modulus.group(1)) if (modulus := _MODULUS.search(question)) else None,
        is_polar=re.search(POLAR_FORM, question, re.IGNORECASE) is not None,
        kind=kind.group(1).lower() if kind else None,
        target=target.group(1) if (target := _TARGET.search(question)) else None,
        question=" ".join(question.split()),
        choices=tuple((letter, text.strip(" .,;$")) for letter, text in _CHOICE.findall(question)),
    )


def _base(match: re.Match[str]) -> int | None:
    written, name = match.groups()
    if name:
        return _BASE_NAMES[name.lower()]
    return int(written) if written.isdigit() else _BASES.get(written.lower())


_ASKED = re.compile(
    r"\bsimplif|\bsimplest|\blowest[ -]terms?\b|\birreducible|\brelatively prime|\bco-?prime|\bcommon fraction"
    r"|\brationali[sz]|\breduce (?:the|your|it|to)\b|\breduced (?:form|fraction|to)\b",
    re.IGNORECASE,
)
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*\{\s*(\d{1,300})\s*\}\s*\{\s*(\d{1,300})\s*\}|(?<![\d.])(\d{1,300})\s*/\s*(\d{1,300})(?![\d.])"
)


def needs_lowest_terms(question: str) -> bool:
    """Whether an answer such as `2/4` for 1/2 is incomplete.

    That is so if the question asks for lowest terms, in words or by relatively prime numbers, or if it contains a fraction that
    is not in lowest terms: an answer could then repeat it ("What is 2/4 as a decimal?").
    """
    if _ASKED.search(question):
        return True
    found = (pair[:2] if pair[0] else pair[2:] for pair in _FRACTION.findall(question))
    return any(int(below) != 0 and REDUCTION in reducible(int(above), int(below)) for above, below in found)
