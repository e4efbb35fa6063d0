"""Whether a question asks for a fraction in lowest terms. Lightweight imports only."""

from __future__ import annotations

import re

from rl_envs.math.number_literals import REDUCTION, reducible

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
