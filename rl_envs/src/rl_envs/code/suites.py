"""Prepares the tests of a row: each assertion is counted instead of ending the test, and statements run one by one.

The tests stay ordinary Python. `assert x == y` becomes

    try:
        rl_tests.begin()
        rl_tests.end(3, x == y)
    except BaseException:
        rl_tests.failed(3)

and runs in the tests' own process (`rl_envs.code.inside`), which the program does not see.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from rl_core.errors import DataError, format_value

_COUNTED = "try:\n    rl_tests.begin()\n    rl_tests.end({0}, None)\nexcept BaseException:\n    rl_tests.failed({0})"
_BUILTIN = frozenset(name for name in vars(builtins) if name.islower() and callable(getattr(builtins, name)))
_LITERAL = (ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.List, ast.Tuple, ast.Set, ast.Dict)
_NESTED = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Suite:
    """Tests, as arguments of `rl_envs.code.inside.run_tests`.

    Attributes:
        statements: Source of each top-level statement, and the names of the classes and modules that it defines.
        owners: By number of an assertion that may run several times or must not be reached: the number of the statement that
            must finish for it to pass; None for all statements of `required`. An assertion in a loop would otherwise pass if
            the program ends, or raises, after the first round.
        unreachable: Numbers of the assertions that are always false: `assert False` after a call that must raise.
        required: Numbers of the statements that must finish: all but imports.
        tested: Builtin names that are functions of the program.
        total: Number of assertions.
    """

    statements: tuple[tuple[str, tuple[str, ...]], ...]
    owners: Mapping[int, int | None]
    unreachable: frozenset[int]
    required: frozenset[int]
    tested: frozenset[str]
    total: int


@lru_cache(maxsize=1024)
def read_suite(source: str, entry_point: str | None) -> Suite:
    """Prepare tests: assertions, or functions `check(candidate)` or `test_...()` with assertions.

    Args:
        source: Python source.
        entry_point: Name of the program's function, passed to `check`.

    Raises:
        DataError: The source is not valid, has no assertion, or defines `check` without an entry point.
    """
    try:
        tree = ast.parse(source)
        compile(source, "tests", "exec", dont_inherit=True)
        functions = dict.fromkeys(node.name for node in tree.body if _is_test_function(node))
        called = {name: len(tree.body) + i for i, name in enumerate(functions)}
        tested = _tested(tree, entry_point)
        counter = _Counter(called)
        statements = [(counter.statement(number, node), tuple(_defined_by(node))) for number, node in enumerate(tree.body)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"The tests are not valid Python ({error}): {format_value(source)}") from error
    if not counter.total:
        raise DataError(f"The tests have no assert statement, so every program would pass: {format_value(source)}")
    if "check" in called and entry_point is None:
        raise DataError("The tests define check(candidate), so the row needs `entry_point`, the function to pass to it.")
    calls = [(f"check({entry_point})" if name == "check" else f"{name}()", ()) for name in called]
    is_import = [isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body]
    return Suite(
        statements=(*statements, *calls),
        owners=counter.owners,
        unreachable=frozenset(counter.unreachable),
        required=frozenset({i for i, imports in enumerate(is_import) if not imports} | set(called.values())),
        tested=tested,
        total=counter.total,
    )


def _is_test_function(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether a top-level statement defines `check(candidate)` or `test_...()`, which is then called."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return node.name == "check" or (node.name.startswith("test_") and not node.args.args)


def _defined_by(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names if alias.name != "*")


def _tested(tree: ast.Module, entry_point: str | None) -> frozenset[str]:
    """Builtin names that are functions of the program: the entry point, and what is called by an assertion without other names.

    `assert abs(sum(10, 15) - 6) < 1` must test a function `sum` of the program: that of its first call whose arguments call
    nothing.
    """
    tested = {entry_point} & _BUILTIN
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
            if names <= _BUILTIN - tested:
                tested |= set(list(_innermost_calls(node.test))[:1])
    bound = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return frozenset(str(name) for name in tested - bound)


def _innermost_calls(node: ast.AST) -> Iterator[str]:
    """Names of the functions whose calls have no call among their arguments, from left to right."""
    for child in ast.iter_child_nodes(node):
        yield from _innermost_calls(child)
    match node:
        case ast.Call(func=ast.Name(id=name)):
            if not any(isinstance(each, ast.Call) for each in ast.walk(node) if each is not node):
                yield name


class _Counter(ast.NodeTransformer):
    """Replaces assertions and marks calls whose results are not used.

    Args:
        called: Numbers of the statements that call the test functions, by the function's name.
    """

    def __init__(self, called: Mapping[str, int]) -> None:
        self.total = 0
        self.owners: dict[int, int | None] = {}
        self.unreachable: set[int] = set()
        self._called = called
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
        self._repeats = repeats or (isinstance(node, _NESTED) and not is_top)
        try:
            return super().visit(node)
        finally:
            self._repeats = repeats

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        constant = _constant(node.test)
        if constant:
            return ast.Pass()  # `assert True` tests nothing
        number, self.total = self.total, self.total + 1
        if constant is not None:
            self.unreachable.add(number)
        if constant is not None or self._repeats:
            self.owners[number] = self._owner
        counted = ast.parse(_COUNTED.format(number)).body[0]
        counted.body[1].value.args[1] = node.test  # type: ignore[attr-defined]
        return counted

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call):
            marked = ast.parse("rl_tests.apply(rl_tests.discard(), None)").body[0]
            marked.value.args[1] = node.value  # type: ignore[attr-defined]
            return marked
        return node


def _constant(node: ast.expr) -> bool | None:
    """The truth of a comparison of literals; None for all other expressions."""
    if any(isinstance(each, ast.expr) and not isinstance(each, _LITERAL) for each in ast.walk(node)):
        return None
    try:
        return bool(eval(compile(ast.Expression(node), "constant", "eval"), {"__builtins__": {}}))
    except Exception:
        return None  # it raises each time that it is reached
