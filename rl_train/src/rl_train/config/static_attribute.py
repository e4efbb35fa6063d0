"""Reads classes and their attributes from source files; imports nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from rl_core.plugins.import_path import find_module


def static_attribute(path: str, name: str) -> object:
    """The value of a class attribute that is written as a literal in the class body; None if it is not.

    Args:
        path: The dotted path of the class.
        name: The attribute. Inherited attributes are only found if the module has already been imported.
    """
    module, _, target = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module in sys.modules:
        return getattr(getattr(sys.modules[module], target, None), name, None)
    source = find_class(module, target)
    found = [_literal(each) for each in source.body if _assigns(each, name)] if source is not None else []
    return found[-1] if found else None


def find_class(module: str, name: str) -> ast.ClassDef | None:
    """The source of a class, also if its module imports it from another one; None if no file has it."""
    try:
        spec = find_module(module)[0]
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError):
        return None
    for statement in reversed(tree.body):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement
        if isinstance(statement, ast.ImportFrom) and statement.module is not None and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return find_class(statement.module, alias.name)
    return None


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _literal(statement: ast.stmt) -> object:
    try:
        return ast.literal_eval(getattr(statement, "value", None) or "None")
    except (ValueError, TypeError):
        return None
