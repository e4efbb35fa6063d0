"""Whether a formula has the form of the expected one: factored, expanded, with a completed square, or reduced.

The answer must have that form, because it may be all that a question asks for: `(x + 2)^2` does not answer "Expand (x + 2)^2".
"""

from __future__ import annotations

from typing import Any

import sympy

from rl_envs.math.formulas import is_identity


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
