"""Writes docs/api_snapshot.txt, the signatures of the public API: `python docs/make_api_snapshot.py`.

Public are the names that the pages of docs/api show, the hooks, the config base classes and the capabilities.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_core.old_paths import NEW_NAMES, NEW_PATHS

DOCS = Path(__file__).parent
SNAPSHOT = DOCS / "api_snapshot.txt"
_RAY_ARGUMENT = "_ray_trace_ctx"
"""Ray adds it to the methods of a class, and of its bases, that was an actor in this process."""
_NEW_PATHS = NEW_PATHS | {
    f"{old}.{name}": f"{new}.{name}"
    for old, modules in NEW_NAMES.items()
    for new, names in modules.items()
    for name in names.split()
}
CONFIGS = ("rl_core.config.schema", "rl_train.config.schema")


def api_snapshot() -> str:
    """One line for each public function, class, method, config key, hook and enum member, sorted."""
    lines = set[str]()
    for path in shown_paths():
        lines.update(_describe(path, _resolve(path)))
    for module in CONFIGS:
        for name, value in vars(importlib.import_module(module)).items():
            if inspect.isclass(value) and name.endswith("Config"):
                lines.update(_describe(f"{module}.{name}", value))
    hooks = importlib.import_module("rl_core.plugins.hookspecs")
    lines.update(line for name in vars(hooks) if name.startswith("rlcore_") for line in _describe(name, getattr(hooks, name)))
    capability = importlib.import_module("rl_core.plugins.component").Capability
    lines.update(_describe("Capability", capability))
    return "\n".join(sorted(lines)) + "\n"


def breaks(snapshot: str, current: str) -> list[str]:
    """The lines of a snapshot that the present API does not have: what was removed, or has another signature."""
    lines = set(current.splitlines())
    return sorted(line for line in snapshot.splitlines() if line not in lines and _with_new_path(line) not in lines)


def _with_new_path(line: str) -> str:
    """A line about a module or a name that has moved, as it is at the new path."""
    old = max((old for old in _NEW_PATHS if re.match(rf"{re.escape(old)}\b", line)), key=len, default=None)
    return line if old is None else _NEW_PATHS[old] + line.removeprefix(old)


def shown_paths() -> Iterator[str]:
    """The paths after `:::` on the pages of docs/api, without those of distributions that need an engine to import."""
    for page in sorted((DOCS / "api").glob("*.md")):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if path.startswith("rl_backends_base") or not path.startswith(("rl_backends_", "rl_envs", "rl_sandbox")):
                yield path


def _resolve(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_resolve(module), name)


def _describe(path: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        names = getattr(value, "__all__", None) or [
            name for name, each in vars(value).items() if getattr(each, "__module__", None) == value.__name__
        ]
        for name in names:
            if not name.startswith("_"):
                yield from _describe(f"{path}.{name}", getattr(value, name))
    elif inspect.isclass(value) and issubclass(value, Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in value)
    elif inspect.isclass(value) and issubclass(value, BaseModel):
        yield from (f"{path}.{key}{' (required)' if field.is_required() else ''}" for key, field in value.model_fields.items())
    elif inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        ours = [each for each in value.__mro__ if each is value or each.__module__.startswith("rl_")]
        for name in dict.fromkeys(name for each in ours for name in vars(each)):
            method = inspect.getattr_static(value, name)
            plain = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(plain):
                abstract = " (abstract)" if getattr(plain, "__isabstractmethod__", False) else ""
                yield f"{path}.{name}{_signature(plain)}{abstract}"
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield path


def _signature(value: Any) -> str:
    """Names, kinds and presence of defaults; types and values of defaults may change in a compatible way."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else ...)
        for name, each in signature.parameters.items()
        if name != _RAY_ARGUMENT
    ]
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return str(plain).replace("Ellipsis", "...")


if __name__ == "__main__":
    current = set(api_snapshot().splitlines())
    moved = {line for line in SNAPSHOT.read_text(encoding="utf-8").splitlines() if _with_new_path(line) in current}
    SNAPSHOT.write_text("\n".join(sorted(current | moved)) + "\n", encoding="utf-8")
