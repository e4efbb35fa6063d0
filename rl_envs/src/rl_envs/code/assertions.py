"""Splits assertions: what calls the program runs inside the sandbox, and the comparison is done outside.

For `assert area(2) == 4`, the sandbox gets `area(2)` and returns its value as text; `== 4` is evaluated here. So the expected
values never enter the sandbox, and a program cannot replace the comparison: not by objects that equal everything, not by
changed builtins, not by ending the process early.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from rl_core.data.formatting import format_value
from rl_core.errors import DataError
from rl_envs.code.evaluation import ARITHMETIC, FUNCTIONS, TYPES, UNARY, VALUE, holds

_ITERATING = frozenset({"all", "any", "list", "max", "min", "set", "sorted", "sum", "tuple"})
"""Functions that only iterate over their first argument, which can therefore be a generator."""


@dataclass(frozen=True)
class SplitTests:
    """Tests, split into what runs inside the sandbox and what is evaluated outside.

    Attributes:
        statements: Source of each top-level statement. An assertion became a call of `__observe__(number, *lambdas, items)`,
            where `items` has the numbers of the lambdas whose values are iterated over.
        conditions: The rest of each assertion, by its number; names that begin with `__value_` are its observations.
    """

    statements: tuple[str, ...]
    conditions: tuple[ast.expr, ...]
    owners: Mapping[int, int | None]
    """By number of an assertion that may run several times or must not be reached: the number of the statement that must finish
    for it to pass; None for all statements of `required`. An assertion in a loop would otherwise pass if the program ends the
    process, or raises, after the first round."""
    unreachable: frozenset[int]
    """Numbers of the assertions that are always false: `assert False` after a call that must raise."""
    required: frozenset[int]
    """Numbers of the statements that must finish: all but imports."""
    definitions: tuple[tuple[str, ...], ...]
    """For each statement, the names of the functions, classes and modules that it defines. The program can use them."""


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
        functions = dict.fromkeys(node.name for node in tree.body if _is_test_function(node))
        called = {name: len(tree.body) + i for i, name in enumerate(functions)}
        splitter = _Splitter(_names_inside(tree, entry_point), called)
        statements = [splitter.statement(number, node) for number, node in enumerate(tree.body)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"The tests are not valid Python ({error}): {format_value(source)}") from error
    if not splitter.conditions:
        raise DataError(f"The tests have no assert statement, so every program would pass: {format_value(source)}")
    if "check" in called and entry_point is None:
        raise DataError("The tests define check(candidate), so the row needs `entry_point`, the function to pass to it.")
    definitions = [tuple(_defined_by(node)) for node in tree.body]
    return SplitTests(
        statements=(*statements, *(f"check({entry_point})" if name == "check" else f"{name}()" for name in called)),
        conditions=tuple(splitter.conditions),
        owners=splitter.owners,
        unreachable=frozenset(splitter.unreachable),
        required=frozenset(
            {i for i, node in enumerate(tree.body) if not isinstance(node, ast.Import | ast.ImportFrom)} | set(called.values())
        ),
        definitions=(*definitions, *(() for _ in called)),
    )


def _is_test_function(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether a top-level statement defines `check(candidate)` or `test_...()`, which is then called."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return node.name == "check" or (node.name.startswith("test_") and not node.args.args)


def _defined_by(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names if alias.name != "*")


def _names_inside(tree: ast.Module, entry_point: str | None) -> frozenset[str]:
    """Names that mean a function of the program or of the tests, also if a built-in function has the same name.

    An assertion whose calls are all of built-in functions, such as `assert sum(10, 15) == 6`, must test a function of the
    program: the one of its first call whose arguments call nothing.
    """
    names = set(_bound_names(tree)) | {entry_point or ""}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            part = _Part(frozenset(names))
            part.split(copy.deepcopy(node.test))
            tested = None if part.observed else next(_innermost_calls(node.test), None)
            names |= {tested} if tested else set()
    return frozenset(names)


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.ImportFrom(module=module, names=names) if module not in ("math", "builtins"):
                yield from (alias.asname or alias.name for alias in names)


def _innermost_calls(node: ast.AST) -> Iterator[str]:
    """Names of the built-in functions whose calls have no call among their arguments, from left to right."""
    for child in ast.iter_child_nodes(node):
        yield from _innermost_calls(child)
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            if not any(isinstance(each, ast.Call) for each in ast.walk(node) if each is not node):
                yield name


class _Splitter(ast.NodeTransformer):
    """Replaces assertions by calls of `__observe__`.

    Args:
        inside: Names whose calls belong inside the sandbox.
        called: Numbers of the statements that call the test functions, by the function's name.
    """

    def __init__(self, inside: frozenset[str], called: Mapping[str, int]) -> None:
        self.conditions: list[ast.expr] = []
        self.owners: dict[int, int | None] = {}
        self.unreachable: set[int] = set()
        self._inside, self._called = inside, called
        self._owner: int | None = None
        self._repeats = False

    def statement(self, number: int, node: ast.stmt) -> str:
        """The source of a top-level statement after the replacement."""
        own: int | None = number
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own = self._called.get(node.name)
        self._owner, self._repeats = own, own is None
        return ast.unparse(ast.fix_missing_locations(self.visit(node)))

    def visit(self, node: ast.AST) -> Any:
        """Visit a node; the assertions below a loop or an inner function may run several times."""
        repeats = self._repeats
        is_top = isinstance(node, ast.FunctionDef) and node.name in self._called
        nested = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self._repeats = repeats or (isinstance(node, nested) and not is_top)
        try:
            return super().visit(node)
        finally:
            self._repeats = repeats

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        part = _Part(self._inside)
        condition = part.split(node.test)
        is_constant = not part.observed
        if is_constant and holds(condition, ()):
            return ast.copy_location(ast.Pass(), node)  # `assert True` tests nothing
        number = len(self.conditions)
        self.conditions.append(condition)
        if is_constant:
            self.unreachable.add(number)
        if is_constant or self._repeats:
            self.owners[number] = self._owner
        arguments = [f"lambda: ({ast.unparse(expression)})" for expression in part.observed]
        arguments += [f"items={tuple(part.iterated)!r}"] if part.iterated else []
        call = f"__observe__({', '.join([str(len(self.conditions) - 1), *arguments])})"
        return ast.copy_location(ast.parse(call).body[0], node)


class _Part:
    """Splits one assertion.

    Args:
        inside: Names whose calls belong inside the sandbox.

    Attributes:
        observed: The expressions that are evaluated inside.
        iterated: Numbers of those whose values are only iterated over.
    """

    def __init__(self, inside: frozenset[str]) -> None:
        self._inside = inside
        self.observed: list[ast.expr] = []
        self.iterated: list[int] = []

    def split(self, node: ast.expr, *, is_iterated: bool = False) -> ast.expr:
        """The expression with every part that cannot be evaluated outside replaced by a name."""
        children = self._children(node)
        if children is None:
            self.observed.append(node)
            number = len(self.observed) - 1
            self.iterated += [number] if is_iterated else []
            return ast.Name(f"{VALUE}{number}", ast.Load())
        iterated = [id(child) for child in _iterated(node)]
        replaced = {id(child): self.split(child, is_iterated=id(child) in iterated) for child in children}
        _Replacer(replaced).generic_visit(node)
        return node

    def _children(self, node: ast.expr) -> list[ast.expr] | None:
        """The operands of a node that can be evaluated outside; None for all other nodes."""
        match node:
            case ast.Constant():
                return []
            case ast.Name(id=name) if name in TYPES and name not in self._inside:
                return []
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items) | ast.BoolOp(values=items):
                return _without_stars(items)
            case ast.Dict(keys=keys, values=values):
                return None if None in keys else [*(key for key in keys if key is not None), *values]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
                return [operand]
            case ast.BinOp(left=ast.Constant(value=str() | bytes()), op=ast.Mod()):
                return None  # text formatting, which can make a text of any length
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return [left, right]
            case ast.Compare(left=left, comparators=others):
                return [left, *others]
            case ast.Call():
                return self._arguments(node)
        return None

    def _arguments(self, call: ast.Call) -> list[ast.expr] | None:
        """The arguments of a call that can be made outside."""
        name = _function(call.func)
        if name not in FUNCTIONS or (name in self._inside and isinstance(call.func, ast.Name)):
            return None
        if name == "isinstance" and not all(self._is_type(kind) for kind in call.args[1:]):
            return None
        values = []
        for keyword in call.keywords:
            if keyword.arg is None or (keyword.arg == "key" and not self._is_function(keyword.value)):
                return None
            values += [] if keyword.arg == "key" else [keyword.value]
        return _without_stars([*call.args, *values])

    def _is_type(self, node: ast.expr) -> bool:
        kinds = node.elts if isinstance(node, ast.Tuple) else [node]
        return all(isinstance(kind, ast.Name) and kind.id in TYPES and kind.id not in self._inside for kind in kinds)

    def _is_function(self, node: ast.expr) -> bool:
        """Whether a value of `key` is a function that can be called outside."""
        is_none = isinstance(node, ast.Constant) and node.value is None
        return is_none or (isinstance(node, ast.Name) and node.id in FUNCTIONS and node.id not in self._inside)


class _Replacer(ast.NodeTransformer):
    """Replaces the given children of a node."""

    def __init__(self, replaced: Mapping[int, ast.expr]) -> None:
        self._replaced = replaced

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.keyword):
            node.value = self._replaced.get(id(node.value), node.value)
        return self._replaced.get(id(node), node)


def _function(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name
    return None


def _iterated(node: ast.expr) -> list[ast.expr]:
    """The operands that an operation only iterates over."""
    match node:
        case ast.Call(func=function, args=[first, *others]) if _function(function) in _ITERATING:
            return [] if others and _function(function) in ("max", "min") else [first]
        case ast.Compare(ops=ops, comparators=others):
            return [other for op, other in zip(ops, others, strict=True) if isinstance(op, ast.In | ast.NotIn)]
    return []


def _without_stars(items: list[ast.expr]) -> list[ast.expr] | None:
    return None if any(isinstance(item, ast.Starred | ast.GeneratorExp | ast.Lambda) for item in items) else items
