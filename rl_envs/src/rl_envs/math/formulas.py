r"""Parses formulas with latex2sympy, completely and without evaluation, and compares their values and their forms.

Two formulas are equal if they agree at several points to 20 of 30 digits. This proves identities such as `(x+1)^2 = x^2+2x+1`
without simplification, which may take forever. Model output is never passed to `sympy.parse_expr` or `sympify`, because they
execute Python.

An answer must also have the form of the expected one (factored, expanded, with a completed square, or reduced), because the
form may be all that a question asks for: `(x + 2)^2` does not answer "Expand (x + 2)^2".

It must also be evaluated, unlike `3 + 2`, `10/2` and `\sqrt{16}`. A fraction in lowest terms, an irrational root and a sum
such as `3 + 2\sqrt{2}` are fully evaluated. A fraction such as `2/4` and a root such as `\sqrt{18}` have their own kind, a
reduction, which only some questions ask for. The rule is that of PRM800K's grader (Lightman et al. 2023, arXiv:2305.20050),
where an unreduced fraction and an expression for an expected integer are wrong, extended to expressions.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from math_verify import verify

from rl_envs.math.numbers import REDUCTION, Number, is_rounded, reducible

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


def has_form_of(expected: Any, answer: Any, *, lowest_terms: bool, factored: bool) -> bool:
    """Whether an answer with the expected value has the expected form, too; True unless the expected formula has variables.

    Args:
        expected: formula of the expected answer, unevaluated.
        answer: formula of the model's answer, unevaluated.
        factored: Whether the factors must have no common factor of their terms, if those of the expected one have none.
        lowest_terms: Whether a quotient of polynomials must be reduced if the expected one is.
    """
    if not expected.free_symbols:
        return True
    if not expected.is_polynomial():
        return not lowest_terms or not is_reducible(answer) or is_reducible(expected)
    if not answer.is_polynomial():
        return False
    if (count := number_of_factors(expected)) > 1:
        return number_of_factors(answer) >= count and not (factored and has_content(answer) and not has_content(expected))
    products, others = products_of_sums(expected), products_of_sums(answer)
    if number_of_factors(answer) > 1 or len(products) != len(others):
        return False
    for product in products:
        equal = next((other for other in others if is_identity(product, other)), None)
        if equal is None:
            return False
        others.remove(equal)
    return True


def number_of_factors(tree: Any) -> int:
    """The number of factors with variables of a product of sums, with their multiplicity; 1 for anything else."""
    if not _is_product_of_sums(tree):
        return 1
    return sum(_multiplicity(factor) for factor in factors_of(tree) if factor.free_symbols)


def has_content(tree: Any) -> bool:
    """Whether a factor has a common factor of its terms: `3x - 6` in `(3x - 6)(x + 2)`."""
    sums = [factor.doit() for factor in factors_of(tree) if isinstance(factor, sympy.Add)]
    return any(factor.as_content_primitive()[0] != 1 for factor in sums)


def products_of_sums(tree: Any) -> list[Any]:
    """The largest products of sums in a formula: `(x - 2)^2` in `(x - 2)^2 + 3`."""
    if _is_product_of_sums(tree):
        return [tree]
    return [product for argument in tree.args for product in products_of_sums(argument)]


def is_reducible(tree: Any) -> bool:
    """Whether numerator and denominator of a quotient of polynomials have a common factor with variables."""
    above, below = sympy.S.One, sympy.S.One
    for factor in factors_of(tree):
        if isinstance(factor, sympy.Pow) and factor.exp.is_Integer and factor.exp < 0:
            below *= factor.base.doit() ** -factor.exp
        else:
            above *= factor.doit()
    if not (below.free_symbols and above.is_polynomial() and below.is_polynomial()):
        return False
    return bool(sympy.gcd(sympy.expand(above), sympy.expand(below)).free_symbols)


def factors_of(tree: Any) -> list[Any]:
    """The factors of nested products; the formula itself if it is not a product."""
    if isinstance(tree, sympy.Pow) and tree.exp == 1:
        return factors_of(tree.base)
    return [factor for part in tree.args for factor in factors_of(part)] if isinstance(tree, sympy.Mul) else [tree]


def _multiplicity(factor: Any) -> int:
    is_power = isinstance(factor, sympy.Pow) and factor.exp.is_Integer and factor.exp > 1
    return int(factor.exp) * sum(map(_multiplicity, factors_of(factor.base))) if is_power else 1


def _is_product_of_sums(tree: Any) -> bool:
    """Whether a formula is a product or power of polynomials, at least one of them a sum."""
    factors = [factor for factor in factors_of(tree) if factor.free_symbols]
    is_sum = any(isinstance(factor.base if isinstance(factor, sympy.Pow) else factor, sympy.Add) for factor in factors)
    return is_sum and sum(map(_multiplicity, factors)) > 1


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
