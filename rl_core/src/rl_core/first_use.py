"""Names of a package that are imported on first use, so that importing the package is cheap, and names that have moved."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def import_on_first_use(
    package: str, names: Mapping[str, str] | None = None, *, moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        names: the names of each module, separated by spaces, by module; a module that begins with a dot is relative. By
            default, the names that the package imports for type checkers (`if TYPE_CHECKING:`).
        moved: names that are deprecated here, in the same form.
    """
    listed_module_of, new_module_of = (
        {name: module for module, listed in (table or {}).items() for name in listed.split()} for table in (names, moved)
    )

    def load(name: str) -> Any:
        module_of = listed_module_of if names is not None else _imports_for_type_checkers(package)
        if name in new_module_of:
            warnings.warn(f"{package}.{name} has moved to {new_module_of[name]}.", DeprecationWarning, stacklevel=2)
        elif name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in new_module_of:
            return imported_from(new_module_of[name], name)
        return getattr(import_module(module_of[name], package), name)

    return load


def imported_from(module: str, name: str) -> Any:
    """A name of the module that it has moved to.

    Raises:
        ImportError: the module is in a distribution that is not installed.
    """
    top = module.partition(".")[0]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        raise ImportError(f"{name} is now in another distribution: pip install {top.replace('_', '-')}") from error


@cache
def _imports_for_type_checkers(package: str) -> dict[str, str]:
    """Name to module of the imports under `if TYPE_CHECKING:` in the source of a package."""
    source = sys.modules[package].__file__
    assert source is not None
    blocks = [node for node in ast.parse(Path(source).read_bytes()).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
