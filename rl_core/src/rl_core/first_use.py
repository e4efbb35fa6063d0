"""Names of a package that are imported on first use, so that importing the package is cheap, and names that have moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_on_first_use(
    package: str, names: Mapping[str, str], *, moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        names: the names of each module, separated by spaces, by module; a module that begins with a dot is relative.
        moved: names that are deprecated here, in the same form.
    """
    module_of, new_module_of = (
        {name: module for module, listed in table.items() for name in listed.split()} for table in (names, moved or {})
    )

    def load(name: str) -> Any:
        if name in new_module_of:
            warnings.warn(f"{package}.{name} has moved to {new_module_of[name]}.", DeprecationWarning, stacklevel=2)
        elif name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module((new_module_of | module_of)[name], package), name)

    return load


def moved_module(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has moved; warns when that is imported."""
    warnings.warn(f"{old} has moved to {new}.", DeprecationWarning, stacklevel=3)
    return lambda name: getattr(import_module(new), name)
