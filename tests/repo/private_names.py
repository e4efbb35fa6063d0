"""Lists the names of other libraries that our distributions use although they are not public.

    python tests/repo/private_names.py

A name is private if a part of it begins with one underscore. Found are imports, attributes whose name none of our modules
defines, and text that names such an attribute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = frozenset({"accelerate", "megatron", "peft", "ray", "torch", "transformers", "vllm"})
_OF_PYTHON = frozenset({
    "_exit", "_getframe", "_run_exitfuncs", "_shutdown", "_field_defaults", "_finalizer_registry", "_callback", "_cleanup",
})  # fmt: skip
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "_operator", "Internal"})
_CLASS_AND_NAME = re.compile(r"[A-Z]\w*\._\w+")


@dataclass(frozen=True, order=True)
class Use:
    """One use: the module's path from the root, the line, and the last private part of the name."""

    module: str
    line: int
    name: str


@cache
def uses(root: Path = ROOT) -> list[Use]:
    """All uses in the sources of our distributions."""
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in root.glob("*/src/**/*.py")}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    return sorted({Use(module, *found) for module, tree in trees.items() for found in _in_module(tree, own)})


def _in_module(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported(node) if is_import else _named(node):
            parts = [part for part in name.split(".") if is_import or part not in own]
            found = [part for part in parts if re.match(r"_(?!_)", part) and part not in _OF_PYTHON]
            yield from ((node.lineno, part) for part in found[-1:])


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [name for name in (prefix + each.name for each in node.names) if name.partition(".")[0] in LIBRARIES]


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in _BY_NAME:
        yield from (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _CLASS_AND_NAME.fullmatch(node.value):
        yield node.value


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
        yield node.attr


if __name__ == "__main__":
    every = uses()
    for use in every:
        print(f"{use.module}:{use.line}  {use.name}")
    print(f"{len(every)} uses of {len({use.name for use in every})} names in {len({use.module for use in every})} modules")
