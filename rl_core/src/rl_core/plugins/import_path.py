"""Objects that a config names by a dotted path: imports them, or checks that they exist by reading source files.

A path that cannot be decided by reading (an extension module, a star import, a module with `__getattr__`) passes: its import
reports the rest.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import symtable
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, frames_of
from rl_core.plugins.component import describe, did_you_mean, no_attribute

MODULE_FOLDERS: list[str] = []
"""Folders that are searched for modules after all others, here and in workers of a Ray cluster that is started later."""


def resolve(dotted: str, *, key: str) -> Any:
    """The object at a dotted path such as `torch.optim.AdamW` or `torch.optim:AdamW`; `key` is the config key, for errors.

    Raises:
        ConfigError: A component of the path does not exist, or its module cannot be imported.
    """
    module_name, _, attribute = dotted.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"`{key}`: {dotted!r} is not a dotted path. Write it in full, such as torch.optim.AdamW.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        file, line = frames_of(error)[-1]
        where = "" if "importlib" in file else f" ({file}:{line})"
        hint = "Check the spelling, or install it; the working directory and the folder of the config are searched as well."
        problem = f"{error}{where}. {hint}" if isinstance(error, ImportError) else f"it raised {describe(error)}{where}."
        raise ConfigError(f"`{key}`: cannot import {module_name!r} of {dotted!r}: {problem}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"`{key}`: {no_attribute(module_name, attribute, dir(module))}")
    return getattr(module, attribute)


def missing_target(path: str) -> str | None:
    """Why `package.module.name` or `package.module:name` cannot be imported, as a sentence; None if it can, or may."""
    module, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    name = attribute.partition(".")[0]
    package = module.partition(".")[0]
    try:
        return _missing(module, name) if module else None
    except (ImportError, AttributeError, ValueError):  # a custom finder, or a module without a spec: its import decides
        return None if package in sys.modules else f"there is no package {package!r}."


def find_module(module: str) -> tuple[importlib.machinery.ModuleSpec | None, str]:
    """Where a module is, without importing its packages, or why it does not exist, as a sentence."""
    first, *inner = module.split(".")
    spec, walked = importlib.util.find_spec(first), first
    if spec is None:
        return None, f"there is no package {first!r}. Install it, or put its folder on PYTHONPATH."
    for part in inner:
        folders = _folders(spec)
        if folders is None:
            return None, f"{walked} is a module, not a package, so it has no {part!r}."
        spec = _find_inside(walked, part, folders)
        if spec is None:
            modules = [each.name for each in pkgutil.iter_modules(folders)]
            return None, f"{walked} has no module {part!r}.{did_you_mean(part, modules)}"
        walked = f"{walked}.{part}"
    return spec, ""


def _missing(module: str, name: str) -> str | None:
    if module in sys.modules:
        loaded = sys.modules[module]
        return None if hasattr(loaded, name) else no_attribute(module, name, dir(loaded))
    spec, problem = find_module(module)
    return problem if spec is None else _missing_in_file(spec, module, name)


def _find_inside(package: str, part: str, folders: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """The module or package `part` in the folders of a package that has not been imported."""
    try:
        return importlib.machinery.PathFinder.find_spec(f"{package}.{part}", folders)
    except KeyError:
        # For a package without __init__.py the finder looks its parent up in sys.modules, which has it only after an import.
        spec = importlib.machinery.ModuleSpec(f"{package}.{part}", None, is_package=True)
        spec.submodule_search_locations = [str(Path(folder) / part) for folder in folders if (Path(folder) / part).is_dir()]
        return spec


def _missing_in_file(spec: importlib.machinery.ModuleSpec, module: str, name: str) -> str | None:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        source = Path(spec.origin).read_bytes()
        tree = ast.parse(source, spec.origin)
        symbols = symtable.symtable(importlib.util.decode_source(source), spec.origin, "exec").get_symbols()
    except OSError:
        return None
    except SyntaxError as error:
        return f"{spec.origin}:{error.lineno} is not valid Python: {error.msg}."
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    modules = [each.name for each in pkgutil.iter_modules(_folders(spec) or [])]
    if any(node.names[0].name == "*" for node in imports) or {"__getattr__", name} & {*names, *modules}:
        return None
    return no_attribute(module, name, names)


def _folders(spec: importlib.machinery.ModuleSpec) -> Sequence[str] | None:
    return None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
