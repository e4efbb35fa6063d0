"""Counts the source: lines, statements, files, the modules that a run needs, and small modules with one importer.

`python tests/repo/sizes.py` prints them; `--write` also writes the numbers to sizes.json, rounded up to multiples of `STEP`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_suffix(".json")
ENTRY = "rl_train.launch.train"
STEP = {"lines": 100, "statements": 100, "modules": 1}
SMALL = 80  # lines of code below which a module with one importer is a section of that module


class Module(NamedTuple):
    """What is counted of a module."""

    lines: int
    statements: int  # without docstrings
    code: int  # lines that are not blank and contain more than a comment or a docstring
    targets: frozenset[str]  # modules in texts such as `rl_train.rewards.config:FunctionConfig`: components and commands


def module_of(text: str) -> Module:
    """Counts the source of a module."""
    nodes = list(ast.walk(ast.parse(text)))
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    docstrings = [node for node in nodes if isinstance(node, ast.Expr) and node.value in texts]
    documented = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = [n for n, line in enumerate(text.splitlines(), 1) if n not in documented and not re.match(r"\s*(#|$)", line)]
    return Module(
        lines=len(text.splitlines()),
        statements=sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings),
        code=len(code),
        targets=frozenset(found[1] for node in texts if (found := re.fullmatch(r"([\w.]+):\w+", str(node.value)))),
    )


@cache
def modules() -> dict[str, Module]:
    """Every module of our distributions."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts[2:]): path for path in ROOT.glob("*/src/**/*.py")}
    return {name.removesuffix(".__init__"): module_of(path.read_text()) for name, path in sorted(paths.items())}


@cache
def imports() -> grimp.ImportGraph:
    """The imports between our modules, also within functions and for type checkers."""
    sys.path[:0] = [str(path) for path in ROOT.glob("*/src")]
    return grimp.build_graph(*{name.partition(".")[0] for name in modules()}, cache_dir=None)


def counts() -> dict[str, dict[str, int]]:
    """Lines and statements of each distribution and of the modules that a run needs; how many these are, and all modules."""
    groups: dict[str, set[str]] = {}
    for name in modules():
        groups.setdefault(name.partition(".")[0], set()).add(name)
    groups[ENTRY] = {ENTRY, *imports().find_upstream_modules(ENTRY)}
    numbers = {
        group: {key: sum(getattr(modules()[name], key) for name in names) for key in ("lines", "statements")}
        for group, names in groups.items()
    }
    numbers[ENTRY]["modules"] = len(groups[ENTRY])
    return numbers | {"all": {"modules": len(modules())}}


def small_modules() -> dict[str, str]:
    """Modules of less than `SMALL` lines of code that one module imports, by name; without components and commands."""
    named = frozenset().union(*(module.targets for module in modules().values()))
    found = {}
    for name, module in modules().items():
        readers = imports().find_modules_that_directly_import(name)
        if module.code < SMALL and len(readers) == 1 and name not in named and not imports().find_children(name):
            found[name] = readers.pop()
    return found


if __name__ == "__main__":
    for group, numbers in counts().items():
        print(f"{group:24}", *(f"{number:7} {unit}" for unit, number in numbers.items()))
    for name, reader in small_modules().items():
        print(f"{modules()[name].code:3} lines of code in {name}, which only {reader} reads")
    if sys.argv[1:] == ["--write"]:
        rounded = {
            group: {unit: -(-n // STEP[unit]) * STEP[unit] for unit, n in row.items()} for group, row in counts().items()
        }
        BUDGET.write_text(json.dumps(rounded, indent=2) + "\n")
