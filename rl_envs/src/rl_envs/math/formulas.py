"""Parses formulas with latex2sympy, completely and without evaluation, and compares their values.

Two formulas are equal if they agree at several points to 20 of 30 digits. This proves identities such as `(x+1)^2 = x^2+2x+1`
without simplification, which may take forever. Model output is never passed to `sympy.parse_expr` or `sympify`, because they
execute Python.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from math_verify import verify

from rl_envs.math.number_literals import Number, is_rounded

_MISREAD = re.compile(r"[^A-Za-z0-9\s+\-*/^_=<>()\[\]{}|!.,;:&\\]|\d\s+\.?\d|\d\s*_|\.\.|\\[a-z]*dots")
"""What the parser ignores (unknown characters, a subscript of a number, dots) or reads as a product (two numbers)."""
_LETTER_RUN = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}|(?<=\{)(?<!\\text\{)(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{4,}")
_POINTS = (0.731, -1.377, 2.113, -0.419, 3.571)
_DIGITS = 30
_INTEGERS, _CONSTANTS = frozenset("klmn"), frozenset("CcKk")
"""Names of parameters: of periodic solutions, and constants of integration."""
IMAGINARY = sympy.Symbol("i")


def formula_of(text: str) -> Any:
    """The unevaluated formula of the whole text; None if it cannot be parsed."""
    if _MISREAD.search(text) or _LETTER_RUN.search(text):
        return None
    try:
        tree = latex2sympy(text)
    except Exception:  # latex2sympy raises bare exceptions
        return None
    # Equations are split before; `41 \\equiv 42` is one for the parser, and math-verify compares its last side.
    return None if tree.atoms(sympy.Equality) else tree


def is_verified(expected: Any, answer: Any) -> bool:
    """Whether math-verify finds two inequalities, sets or matrices equal."""
    # Expected first: verify is not symmetric (the expected `1<x<2` accepts the answer `(1,2)`, not the other way round).
    return bool(verify([expected], [answer], timeout_seconds=None))


def has_same_value(expected: Any, answer: Any, gold: Number | None, given: Number | None) -> bool:
    """Whether two formulas are equal, or one is a decimal of at least six digits and the other rounds to it.

    Args:
        expected: formula of the expected answer.
        answer: formula of the model's answer.
        gold: the expected answer, if it is a number literal.
        given: the model's answer, if it is a number literal.
    """
    difference = _exact(expected) - _exact(answer)
    if difference.is_Rational:
        return bool(difference == 0)
    if _is_zero(difference):
        return True
    decimal, other = (gold, answer) if gold is not None else (given, expected)
    if decimal is None or decimal.places is None:
        return False
    value = value_of(other)
    return value is not None and is_rounded(value, decimal)


def with_parameter_of(expected: Any, answer: Any) -> Any:
    r"""The answer with the expected name of its parameter: `2\pi k` for `2\pi n`, `x^2 + C` for `x^2 + K`."""
    named, given = list(expected.free_symbols - answer.free_symbols), list(answer.free_symbols - expected.free_symbols)
    if len(named) != 1 or len(given) != 1:
        return answer
    pair = {str(named[0]), str(given[0])}
    is_integer = pair <= _INTEGERS and expected.has(sympy.pi)
    is_constant = str(named[0]) in "Cc" and pair <= _CONSTANTS and named[0] in expected.args and given[0] in answer.args
    return answer.subs(given[0], named[0]) if is_integer or is_constant else answer


def is_identity(one: Any, other: Any) -> bool:
    """Whether two formulas have the same value for all values of their variables."""
    return _is_zero(_exact(one) - _exact(other))


def value_of(formula: Any) -> Fraction | None:
    """The value of a formula to 30 digits; None if it has variables or is not a real number."""
    value = None if formula.free_symbols - {IMAGINARY} else _number_at(_exact(formula), {})
    return _as_fraction(value) if value is not None and value.is_real else None


def are_proportional(expected: Any, answer: Any) -> bool:
    """Whether two equations, given as differences of their sides, are multiples of each other: `2x = 4` and `x = 2`."""
    values = [
        (one, other)
        for one, other in zip(_values(_exact(expected), answer), _values(_exact(answer), expected), strict=True)
        if one is not None and other is not None
    ]
    if len(values) < 3 or any(abs(one) < 1e-15 or abs(other) < 1e-15 for one, other in values):
        return False
    ratios = [one / other for one, other in values]
    return all(abs(ratio - ratios[0]) < 1e-15 * abs(ratios[0]) for ratio in ratios)


def _is_zero(difference: Any) -> bool:
    """Whether a formula is zero at several points, to 20 of 30 digits; False if it is defined at fewer than three of them."""
    values = [value for value in _values(difference, difference) if value is not None]
    needed = 3 if difference.free_symbols else 1
    return len(values) >= needed and all(abs(value) < 1e-20 for value in values)


def _values(formula: Any, other: Any) -> list[Any]:
    """The formula's values at points that depend only on the variables; None at points where the formula is undefined."""
    symbols = sorted(formula.free_symbols | other.free_symbols, key=str)
    if not symbols:
        return [_number_at(formula, {})]
    points = [
        {
            symbol: sympy.Rational(str(_POINTS[(row + 2 * column) % len(_POINTS)])) + column
            for column, symbol in enumerate(symbols)
        }
        for row in range(len(_POINTS))
    ]
    return [_number_at(formula, point) for point in points]


def _number_at(formula: Any, point: dict[Any, Any]) -> Any:
    value = sympy.N(formula.subs(point), _DIGITS, maxn=200)
    is_number = value.is_number and not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
    return value if is_number and not value.atoms(sympy.Function) else None


def _exact(formula: Any) -> Any:
    """The formula with decimals as exact fractions, and `i` as the imaginary unit."""
    exact = {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}
    formula = formula.xreplace(exact).doit()
    return formula.subs(IMAGINARY, sympy.I)


def _as_fraction(value: Any) -> Fraction:
    rational = sympy.Rational(str(value))
    return Fraction(int(rational.p), int(rational.q))


def tree_of(text: str, number: Number | None) -> Any:
    """The formula of a text, which may be a number literal; None if it cannot be parsed."""
    return formula_of(text) if number is None else sympy.Rational(number.value.numerator, number.value.denominator)
