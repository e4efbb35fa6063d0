r"""Notations that belong to some questions only: residues, numerals with a base, and polar forms."""

from __future__ import annotations

import re

from rl_envs.math.asked_form import AskedForm
from rl_envs.math.formulas import formula_of, value_of
from rl_envs.math.notation import plain
from rl_envs.math.number_literals import read_numeral

_CONGRUENT = re.compile(
    r"(?:(.*?)\\equiv(?![A-Za-z]))?(.*?)(?:\\pmod\s*\{?\s*(\d+)\s*\}?|\(\s*(?:\\text\{\s*mod\s*\}|\\?mod(?![a-z]))\s*(\d+)\s*\))"
)
_VARIABLE = re.compile(r"\s*[A-Za-z]\s*")
_PREFIXED = re.compile(r"0([xbo])([0-9A-F]+)", re.IGNORECASE)
_PREFIXES = {"x": 16, "b": 2, "o": 8}
_POLAR = re.compile(r"(?<![A-Za-z\\])e\s*\^|\\(?:exp|cos|angle)(?![A-Za-z])|(?<![A-Za-z])cis(?![A-Za-z])")


def lacks_polar_form(expected: str, answer: str, form: AskedForm) -> bool:
    """Whether the question asks for the polar form, and the expected answer has it but not the model's."""
    return form.is_polar and _POLAR.search(expected) is not None and _POLAR.search(answer) is None


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
    values = [None if tree is None else value_of(tree) for tree in trees]
    if values[0] is None or values[1] is None or (values[0] - values[1]) % form.modulus:
        return answer
    return residue
