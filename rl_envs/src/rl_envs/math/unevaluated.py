r"""Finds unevaluated arithmetic in an answer: the sum in `3 + 2`, the division in `10/2`, the root in `\sqrt{16}`.

A fraction in lowest terms, a root that is irrational and a sum such as `3 + 2\sqrt{2}` are fully evaluated. A fraction such as
`2/4` and a root such as `\sqrt{18}` have their own kind, a reduction, which only some questions ask for.
The rule is that of PRM800K's grader (Lightman et al. 2023, arXiv:2305.20050), where an unreduced fraction and an expression
for an expected integer are wrong, extended to expressions.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from rl_envs.math.formulas import IMAGINARY
from rl_envs.math.number_literals import REDUCTION, reducible

_IN_TEXT = {
    "binomial": re.compile(r"\\binom(?![a-z])"),
    "gcd": re.compile(r"\\gcd(?![a-z])"),
    "lcm": re.compile(r"\\lcm(?![a-z])|(?<![a-z])lcm(?![a-z])"),
    "division": re.compile(
        r"\\div(?![a-z])|\}\s*\{\s*-?\s*1\s*\}|/\s*-?1(?![\d.])|(?:/|\}\{)\s*\\infty|(?<=[\d)}])\s*:\s*(?=[\d({\\])"
    ),
    "power": re.compile(r"\^\{\s*[01]\s*\}"),
    "remainder": re.compile(r"\\[bp]?mod(?![a-z])"),
    "product": re.compile(
        r"(?<![\d.}])1\s*(?:\\times|\\cdot|\*)(?![a-z])|(?:\\times|\\cdot|\*)\s*1(?![\d.])|(?<![\d.}_^{])1\s?(?=[A-Za-z])(?!i(?![A-Za-z]))"
    ),
    "determinant": re.compile(r"\\det(?![a-z])|\\begin\{vmatrix\}"),
}
_FRACTION = re.compile(
    r"\\frac\s*\{\s*-?\s*(\d{1,300})\s*\}\s*\{\s*-?\s*(\d{1,300})\s*\}|(?<![\d.^])(\d{1,300})\s*[/:]\s*(\d{1,300})(?![\d.])"
)
MULTIPLE = "multiple of a sum"
"""The kind of unevaluated arithmetic in `3 + 4(n - 1)`."""
_LOGARITHM = re.compile(r"\\(?:ln|log)(?![a-z])")
_ALWAYS = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.Mod, sympy.factorial, sympy.binomial)
_OF_RATIONALS = (sympy.Abs, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min)


def undone_arithmetic(text: str, tree: Any) -> frozenset[str]:
    r"""The kinds of unevaluated operations in the answer, such as `sum` and `power`; empty if it is a value.

    Args:
        text: the normalized answer; needed for what the parser evaluates itself (fractions of whole numbers, `\binom`).
        tree: the parsed answer, unevaluated.
    """
    kinds = {kind for kind, pattern in _IN_TEXT.items() if pattern.search(text)}
    for above, below, plain_above, plain_below in _FRACTION.findall(text):
        numerator, denominator = int(above or plain_above), int(below or plain_below)
        kinds |= reducible(numerator, denominator) if denominator else frozenset()
    if _LOGARITHM.search(text) and not tree.has(sympy.log):
        kinds.add("logarithm")
    for node in sympy.preorder_traversal(tree):
        kinds |= _of_node(node)
    return frozenset(kinds)


def _of_node(node: Any) -> set[str]:
    if isinstance(node, sympy.Add):
        return _of_sum(node)
    if isinstance(node, sympy.Mul):
        return _of_product(node)
    if isinstance(node, sympy.Pow):
        return _of_power(node)
    if isinstance(node, _ALWAYS):
        return {type(node).__name__.lower()}
    if isinstance(node, _OF_RATIONALS):
        return set() if node.free_symbols else {type(node).__name__.lower()}
    if isinstance(node, sympy.Function) and not node.free_symbols and not _has_arithmetic(node.args):
        value = node.func(*(argument.doit() for argument in node.args))
        return set() if value.has(node.func) else {"function"}
    return set()


def _of_sum(node: Any) -> set[str]:
    """Two rational terms, two with the same factor such as `2x + 3x`, or a multiple of a sum such as `3 + 4(n - 1)`."""
    terms = _flat(node, sympy.Add)
    bare = [_coefficient_free(term) for term in terms]
    return ({"sum"} if len(set(bare)) < len(bare) or (0 in terms and not node.has(IMAGINARY)) else set()) | (
        {MULTIPLE} if any(map(_is_multiple_of_sum, terms)) else set()
    )


def _is_multiple_of_sum(term: Any) -> bool:
    others = [factor for factor in _flat(term, sympy.Mul) if not _is_rational(factor)] if isinstance(term, sympy.Mul) else []
    return len(others) == 1 and isinstance(others[0], sympy.Add)


def _of_product(node: Any) -> set[str]:
    above, below, common = 1, 1, 1
    count_above, count_below = 0, 0
    for factor in _flat(node, sympy.Mul):
        if isinstance(factor, sympy.Float):
            count_above, count_below = count_above + 1, count_below + 1
        elif isinstance(factor, sympy.Add):
            content = factor.doit().as_content_primitive()[0]
            common *= int(content) if content.is_Integer else 1
        elif isinstance(factor, sympy.Rational):
            above, below = above * abs(factor.p), below * factor.q
            count_above, count_below = count_above + (abs(factor.p) != 1), count_below + (factor.q != 1)
        elif isinstance(factor, sympy.Pow) and factor.exp == -1 and isinstance(factor.base, sympy.Rational):
            above, below = above * factor.base.q, below * abs(factor.base.p)
            count_above, count_below = count_above + (factor.base.q != 1), count_below + 1
    kinds = {"product"} if count_above > 1 else set()
    if count_below > 1:
        kinds.add("division")
    roots = sum(_is_root(factor) and factor.base.is_Rational for factor in _flat(node, sympy.Mul))
    if roots > 1 or (common > 1 and (count_above or count_below)):
        kinds.add(REDUCTION)
    return kinds | (reducible(above, below) if below not in (0, 1) else frozenset())


def _of_power(node: Any) -> set[str]:
    base, exponent = node.base, node.exp
    if exponent == -1 and not base.free_symbols and any(_is_root(node) for node in sympy.preorder_traversal(base)):
        return {REDUCTION}
    if base == IMAGINARY and exponent.is_Integer and exponent > 1:
        return {"power"}
    if base.is_Float or not base.is_Rational or not exponent.is_Rational:
        is_number = base.is_Float and exponent.is_Rational
        return {"power"} if is_number or (exponent == 0) else set()
    if exponent.is_Integer:
        return set() if exponent == -1 else {"power"}
    roots = [sympy.integer_nthroot(abs(part), exponent.q) for part in (base.p, base.q)]
    if all(is_exact for _, is_exact in roots):
        return {"root"}
    return {REDUCTION} if exponent < 0 or not sympy.Pow(base, exponent).is_Pow else set()


def _is_root(node: Any) -> bool:
    return isinstance(node, sympy.Pow) and node.exp.is_Rational and not node.exp.is_Integer


def _flat(node: Any, kind: type) -> list[Any]:
    """The arguments of nested sums (or products) as a flat list; a difference is a sum with a factor of -1."""
    return [leaf for part in node.args for leaf in (_flat(part, kind) if isinstance(part, kind) else [part])]


def _coefficient_free(term: Any) -> Any:
    """The term without its rational factors, as a comparable value."""
    factors = _flat(term, sympy.Mul) if isinstance(term, sympy.Mul) else [term]
    return tuple(sorted(sympy.srepr(factor) for factor in factors if not _is_rational(factor)))


def _is_rational(factor: Any) -> bool:
    if isinstance(factor, sympy.Pow):
        return bool(factor.exp == -1 and factor.base.is_Number)
    return bool(factor.is_Number and factor.is_finite)


def _has_arithmetic(arguments: Any) -> bool:
    return any(_of_node(node) for argument in arguments for node in sympy.preorder_traversal(argument))
