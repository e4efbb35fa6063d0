"""Reads class attributes from source files; imports nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from rl_core.plugins.static_lookup import find_spec


def static_attribute(path: str, name: str) -> object:
    """The value of a class attribute that is written as a literal in the class body; None if it is not.

    Args:
        path: The dotted path of the class.
        name: The attribute. Inherited attributes are only found if the module has already been imported.
    """
    module, _, target = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module in sys.modules:
        return getattr(getattr(sys.modules[module], target, None), name, None)
    try:
        spec = find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError):
        return None
    bodies = [each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == target]
    found = [_literal(each) for body in bodies for each in body if _assigns(each, name)]
    return found[-1] if found else None


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _literal(statement: ast.stmt) -> object:
    try:
        return ast.literal_eval(getattr(statement, "value", None) or "None")
    except (ValueError, TypeError):
        return None
