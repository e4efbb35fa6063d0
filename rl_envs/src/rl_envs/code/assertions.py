"""Splits assertions: what calls the program runs inside the sandbox, and the comparison is done outside.

For `assert area(2) == 4`, the sandbox gets `area(2)` and returns its value as text; `== 4` is evaluated here. So the expected
values never enter the sandbox, and a program cannot replace the comparison: not by objects that equal everything, not by
changed builtins, not by ending the process early.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_core.errors import DataError

_VALUE = "__value_"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function for name, function in vars(math).items() if name in ("ceil", "fabs", "floor", "isclose", "isinf", "sqrt")
} | {
    function.__name__: function
    for function in (abs, all, any, float, int, isinstance, len, list, max, min, round, set, sorted, str, sum, tuple)
}
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
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
_LARGEST_BITS = 20_000


@dataclass(frozen=True)
class Observation:
    """What a part of an assertion evaluated to inside the sandbox: a plain value, or nothing because it raised."""

    raised: bool
    value: Any = None


@dataclass(frozen=True)
class SplitTests:
    """Tests, split into what runs inside the sandbox and what is evaluated outside.

    Attributes:
        statements: Source of each top-level statement. An assertion became a call of `__observe__(number, *lambdas)`.
        conditions: The rest of each assertion, by its number; names that begin with `__value_` are its observations.
    """

    statements: tuple[str, ...]
    conditions: tuple[ast.expr, ...]


@lru_cache(maxsize=1024)
def split_tests(source: str, entry_point: str | None) -> SplitTests:
    """Split tests: assertions, or functions `check(candidate)` or `test_...()` with assertions.

    Args:
        source: Python source.
        entry_point: Name of the program's function, passed to `check`.

    Raises:
        DataError: The source is not valid, has no assertion, or defines `check` without an entry point.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"The tests are not valid Python ({error}): {source[:200]!r}") from error
    splitter = _Splitter()
    statements = [ast.unparse(ast.fix_missing_locations(splitter.visit(node))) for node in tree.body]
    if not splitter.conditions:
        raise DataError(f"The tests have no assert statement, so every program would pass: {source[:200]!r}")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            if entry_point is None:
                raise DataError(
                    "The tests define check(candidate), so the row needs `entry_point`, the function to pass to it."
                )
            statements.append(f"check({entry_point})")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not node.args.args:
            statements.append(f"{node.name}()")
    return SplitTests(tuple(statements), tuple(splitter.conditions))


class _Splitter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.conditions: list[ast.expr] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        observed: list[ast.expr] = []
        self.conditions.append(_split(node.test, observed))
        lambdas = ", ".join(f"lambda: ({ast.unparse(expression)})" for expression in observed)
        call = f"__observe__({len(self.conditions) - 1}, {lambdas})"
        return ast.copy_location(ast.parse(call).body[0], node)


def _split(node: ast.expr, observed: list[ast.expr]) -> ast.expr:
    """The expression with every part that cannot be evaluated outside replaced by a name; the parts are appended."""
    children = _children(node)
    if children is None:
        observed.append(node)
        return ast.Name(f"{_VALUE}{len(observed) - 1}", ast.Load())
    replaced = {id(child): _split(child, observed) for child in children}
    _Replacer(replaced).generic_visit(node)
    return node


class _Replacer(ast.NodeTransformer):
    """Replaces the given children of a node."""

    def __init__(self, replaced: Mapping[int, ast.expr]) -> None:
        self._replaced = replaced

    def visit(self, node: ast.AST) -> Any:
        return self._replaced.get(id(node), node)


def _children(node: ast.expr) -> list[ast.expr] | None:
    """The operands of a node that can be evaluated outside; None for all other nodes."""
    match node:
        case ast.Constant():
            return []
        case ast.Name(id=name) if name in _TYPES:
            return []
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items) | ast.BoolOp(values=items):
            return _without_stars(items)
        case ast.Dict(keys=keys, values=values):
            return None if None in keys else [*(key for key in keys if key is not None), *values]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return [left, right]
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.Call(func=function, args=args, keywords=keywords) if _function(function) is not None:
            return None if any(k.arg is None for k in keywords) else _without_stars([*args, *(k.value for k in keywords)])
    return None


def _without_stars(items: list[ast.expr]) -> list[ast.expr] | None:
    return None if any(isinstance(item, ast.Starred | ast.GeneratorExp | ast.Lambda) for item in items) else items


def _function(node: ast.expr) -> Callable[..., Any] | None:
    match node:
        case ast.Name(id=name):
            return _FUNCTIONS.get(name)
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return _FUNCTIONS.get(name)
    return None


class _FailedError(Exception):
    """A part of an assertion raised inside the sandbox, or its value cannot be used."""


def holds(condition: ast.expr, observations: Sequence[Observation]) -> bool:
    """Whether an assertion holds.

    Args:
        condition: From `split_tests`.
        observations: The values that its parts had. They come from the sandbox, so they can be anything.
    """
    try:
        return bool(_evaluate(condition, observations))
    except (_FailedError, ArithmeticError, TypeError, ValueError, IndexError, RecursionError, MemoryError):
        return False


def _evaluate(node: ast.expr, observations: Sequence[Observation]) -> Any:
    def value(child: ast.expr) -> Any:
        return _evaluate(child, observations)

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return _TYPES[name] if name in _TYPES else _observation(name, observations)
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
            return _UNARY[type(op)](value(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(value(left)), _number(value(right)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [value(item) for item in (left, *others)]
            return all(_COMPARISONS[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.Call(func=function, args=args, keywords=keywords):
            called = _function(function)
            assert called is not None
            return called(*(value(arg) for arg in args), **{str(k.arg): value(k.value) for k in keywords})
    raise _FailedError


def _observation(name: str, observations: Sequence[Observation]) -> Any:
    number = int(name.removeprefix(_VALUE))
    if number >= len(observations) or observations[number].raised:
        raise _FailedError
    return observations[number].value


def _number(value: Any) -> Any:
    """Arithmetic outside of the sandbox takes numbers of moderate size only: a string times 10**9 would fill the memory."""
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise _FailedError
    if not isinstance(value, int | float | complex):
        raise _FailedError
    return value
