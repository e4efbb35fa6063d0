"""Evaluates the part of an assertion that stays outside of the sandbox, within bounds of time and memory.

The operands may come from the sandbox, so they can be anything: no operation takes long or makes a value of more than about
a million elements.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VALUE = "__value_"
"""Begins the names of the values from the sandbox; the rest of the name is the number."""
LARGEST_SIZE = 1 << 20
"""Largest number of elements or characters of a value that an operator makes."""
_LARGEST_BITS = 20_000
_MOST_DIGITS = 5_000


@dataclass(frozen=True)
class Observation:
    """What a part of an assertion evaluated to inside the sandbox: a plain value, or nothing because it raised."""

    raised: bool
    value: Any = None


class FailedError(Exception):
    """A part of an assertion raised inside the sandbox, or its value cannot be used."""


class TooLargeError(FailedError):
    """A value would be larger than the bounds allow."""


def _rounded(number: Any, ndigits: Any = None) -> Any:
    if isinstance(ndigits, int) and abs(ndigits) > _MOST_DIGITS:
        raise TooLargeError  # round(1, -10**9) computes 10**10**9
    return round(number, ndigits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function for name, function in vars(math).items() if name in ("ceil", "fabs", "floor", "isclose", "isinf", "sqrt")
} | {
    function.__name__: function
    for function in (abs, all, any, float, int, isinstance, len, list, max, min, set, sorted, str, sum, tuple)
}
"""Functions that are called outside, by name."""
FUNCTIONS["round"] = _rounded
TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""Types that may be operands outside, by name."""
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_SEQUENCES = (str, bytes, list, tuple)


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | complex):
        raise FailedError
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise TooLargeError
    return value


def _size(value: Any) -> int:
    """Number of elements and characters, also of the elements inside."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(1 + _size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(1 + _size(item) for item in value)
    return 0


def _product(left: Any, right: Any) -> Any:
    items, times = (left, right) if isinstance(left, _SEQUENCES) else (right, left)
    if not isinstance(items, _SEQUENCES):
        return _number(left) * _number(right)
    if not isinstance(times, int):
        raise FailedError
    if _size(items) * times > LARGEST_SIZE:
        raise TooLargeError
    return items * times


def _total(left: Any, right: Any) -> Any:
    for kind in _SEQUENCES:
        if isinstance(left, kind) and isinstance(right, kind):
            if _size(left) + _size(right) > LARGEST_SIZE:
                raise TooLargeError
            return operator.add(left, right)
    return _number(left) + _number(right)


def _difference(left: Any, right: Any) -> Any:
    if isinstance(left, set) and isinstance(right, set):
        return left - right
    return _number(left) - _number(right)


def _power(base: Any, exponent: Any) -> Any:
    both_whole = isinstance(base, int) and isinstance(exponent, int)
    if both_whole and exponent > 0 and base.bit_length() * exponent > _LARGEST_BITS:
        raise TooLargeError
    return _number(base) ** _number(exponent)


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: function(_number(left), _number(right))


ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _total,
    ast.Sub: _difference,
    ast.Mult: _product,
    ast.Pow: _power,
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
}


def holds(condition: ast.expr, observations: Sequence[Observation]) -> bool:
    """Whether an assertion holds.

    Args:
        condition: From `rl_envs.code.assertions.split_tests`.
        observations: The values that its parts had. They come from the sandbox, so they can be anything.
    """
    try:
        return bool(evaluate(condition, observations))
    except (FailedError, ArithmeticError, TypeError, ValueError, IndexError, RecursionError, MemoryError):
        return False


def evaluate(node: ast.expr, observations: Sequence[Observation]) -> Any:
    """The value of an expression.

    Raises:
        FailedError: A part raised, or a value cannot be used, or would be too large.
        Exception: What the operators and functions raise for wrong operands.
    """

    def value(child: ast.expr) -> Any:
        return evaluate(child, observations)

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return _named(name, observations)
        case ast.List(elts=items):
            return [value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(value(item) for item in items)
        case ast.Set(elts=items):
            return {value(item) for item in items}
        case ast.Dict(keys=keys, values=values):
            return {value(key): value(item) for key, item in zip(keys, values, strict=True) if key is not None}
        case ast.BoolOp(op=ast.And(), values=items):
            return all(value(item) for item in items)
        case ast.BoolOp(values=items):
            return any(value(item) for item in items)
        case _:
            return _operation(node, value)


def _operation(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    match node:
        case ast.UnaryOp(op=op, operand=operand):
            return UNARY[type(op)](value(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return ARITHMETIC[type(op)](value(left), value(right))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [value(item) for item in (left, *others)]
            return all(COMPARISONS[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            return FUNCTIONS[name](*(value(arg) for arg in args), **{str(k.arg): value(k.value) for k in keywords})
    raise FailedError


def _named(name: str, observations: Sequence[Observation]) -> Any:
    if not name.startswith(VALUE):
        return TYPES.get(name) or FUNCTIONS[name]
    number = int(name.removeprefix(VALUE))
    if number >= len(observations) or observations[number].raised:
        raise FailedError
    return observations[number].value


def expected_size(condition: ast.expr) -> int:
    """Number of characters of the values that an assertion compares results with by `==`.

    Raises:
        TooLargeError: Such a value is larger than the bounds allow, so the assertion can never hold.
    """
    total = 0
    for node in ast.walk(condition):
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.Eq) for op in node.ops):
            operands = [node.left, *node.comparators]
            known = [each for each in operands if not _is_observed(each)]
            total += max(map(_text_size, known), default=0) if len(known) < len(operands) else 0
    return total


def _is_observed(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id.startswith(VALUE) for each in ast.walk(node))


def _text_size(node: ast.expr) -> int:
    try:
        return len(repr(evaluate(node, ())))
    except TooLargeError:
        raise
    except Exception:  # the assertion fails, as it would in Python
        return 0
