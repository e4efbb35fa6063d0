"""A calculator for models: evaluates arithmetic from its syntax tree, without running code."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

_LONGEST = 400
"""Longest expression in characters."""
_MOST_BITS = 20_000
"""Size of the largest whole number, about 6,000 digits, so that no expression takes long."""
Number = int | float


_MOST_DIGITS = 10_000
"""Largest number of digits of `round`; `round(1, -10**9)` would compute 10**10**9."""


def _round(number: Number, digits: int | None = None, /) -> Number:
    return round(number, digits if digits is None else max(-_MOST_DIGITS, min(digits, _MOST_DIGITS)))


_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_WRITTEN = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))(?![^()]*\))")


def calculator(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, sqrt, abs, round, min, max, log, exp, sin, cos, tan, pi and e.
    """
    return _written(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of an expression; whole numbers stay exact.

    Raises:
        ValueError: It is not arithmetic, or is too long or too large.
        ZeroDivisionError: It divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {_LONGEST} are allowed")
    text = _THOUSANDS.sub("", expression)
    for symbol, written in _WRITTEN.items():
        text = text.replace(symbol, written)
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and base.bit_length() * exponent > _MOST_BITS:
        raise ValueError("the result is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return _checked(value)


def _checked(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise ValueError("the result is too large")
    elif not math.isfinite(value):
        raise ValueError("the result is not a finite number")
    return value


def _written(value: Number) -> str:
    """A whole number as it is, without an exponent; others with 12 significant digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, float):
        return f"{value:.12g}"
    digits: list[str] = []
    sign, rest = ("-" if value < 0 else ""), abs(value)
    while rest >= 10**4000:  # str() refuses numbers of more than 4,300 digits
        rest, low = divmod(rest, 10**4000)
        digits.insert(0, f"{low:04000d}")
    return sign + "".join([str(rest), *digits])
