"""Converts the config of another framework with the import table of that framework.

Every key (a value, a list of values or an empty section) is listed once, with its source location.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from omegaconf import OmegaConf

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation, dotted, show
from rl_core.config.introspection import NO_DEFAULT
from rl_core.errors import ConfigError
from rl_train.config.secrets import Secrets
from rl_train.config.sources import escape, read_sources, resolve
from rlcore_cli.importing.rows import (
    MISSING,
    Decision,
    Defaulted,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Table,
    Unsupported,
)

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
_UNKNOWN = "unknown {framework} key"
_ORDER = ("loss_fn", "policy", "value", "teacher", "data", "env", "cluster", "checkpointing", "logger")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^${}]*)\}")
_HELD = re.compile("\ue000([^\ue000\ue001]*)\ue001")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome of one key of the imported config.

    Attributes:
        key: The dotted key.
        value: Its value.
        location: Its source location; None for a default of the framework that the file does not set.
        decision: The outcome and its reason.
        targets: The new dotted keys that the value went to; empty if there are none.
    """

    key: str
    value: Any
    location: SourceLocation | None
    decision: Decision
    targets: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """`kept`, `renamed`, `redundant` or `unsupported`."""
        match self.decision:
            case Unsupported():
                return "unsupported"
            case Redundant():
                return "redundant"
            case Mapped():
                return "kept" if self.targets == (self.key,) and not self.decision.note else "renamed"

    @property
    def reason(self) -> str:
        """The reason of the outcome, or how the meaning changes; empty if there is nothing to add."""
        return self.decision.note if isinstance(self.decision, Mapped) else self.decision.reason


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The new config, and the outcome of each imported key.

    Attributes:
        values: The new config as plain values, sections in their usual order.
        lines: One for each imported key, in the order of the file.
        added: Keys that the new config needs in addition.
    """

    values: dict[str, Any]
    lines: tuple[Line, ...]
    added: tuple[Defaulted, ...]

    def to_yaml(self) -> str:
        """The new config as YAML. References to environment variables are kept."""
        text = yaml.safe_dump(escape(self.values), sort_keys=False, allow_unicode=True, width=120)
        return re.sub(r"\\+\$\{oc\.env:", "${oc.env:", text)


def import_config(path: str | os.PathLike[str], table: Table) -> Imported:
    """Converts a config of another framework.

    Args:
        path: The file; `defaults:` and `${...}` are resolved.
        table: The import table of the framework.

    Raises:
        ConfigError: The file cannot be read, is not a YAML mapping, has no known section, or is an rlcore config.
    """
    problems = Problems()
    written = read_sources(path, problems=problems)
    problems.raise_if_any()
    values = _resolved(written, problems)
    problems.raise_if_any()
    foreign = ForeignConfig(values)
    if foreign.get(table.native_key) is not None:
        raise ConfigError(
            f"{os.fspath(path)} is already an rlcore config: it sets {table.native_key}, which {table.framework} does not "
            "have. Check it with `rlcore validate`."
        )
    lines = [_line(path, value, written, table, foreign) for path, value in _leaves(values)]
    if not any(line.key.split(".")[0] in table.sections for line in lines):
        sections = ", ".join(sorted({line.key.split(".")[0] for line in lines})) or "none"
        raise ConfigError(
            f"{os.fspath(path)} is not a {table.framework} config: it should have sections such as "
            f"{', '.join(table.sections)}, but has {sections}."
        )
    lines += _defaults(table, foreign)
    native: dict[str, Any] = {}
    for line in lines:
        if isinstance(line.decision, Mapped):
            native |= line.decision.values
    added = tuple(table.additions(foreign, native))
    native |= {one.key: one.value for one in added}
    return Imported(values=_in_order(_tree(native)), lines=tuple(lines), added=added)


def _resolved(written: Node, problems: Problems) -> dict[str, Any]:
    """The plain values. `???` and `${oc.env:...}` are kept for the user to fill in, so no secret is read."""
    written = _with_environment_held(written)
    missing = [path for path, leaf in written.leaves() if leaf.value == MISSING]
    before = {name for name in _ARITHMETIC if OmegaConf.has_resolver(name)}
    for name in _ARITHMETIC.keys() - before:
        OmegaConf.register_resolver(name, _ARITHMETIC[name])
    try:
        values, _ = resolve(written, default_at=lambda path: NO_DEFAULT, known=(), problems=problems, secrets=Secrets())
    finally:
        for name in _ARITHMETIC.keys() - before:
            OmegaConf.clear_resolver(name)
    problems.found = [problem for problem in problems.found if problem.path not in missing]
    for path in missing:
        holder: Any = values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = MISSING
    released: dict[str, Any] = _with_environment_released(values)
    return released


def _with_environment_held(written: Node) -> Node:
    """The tree with `${oc.env:...}` hidden from the resolver, except as an argument of another interpolation.

    The variable may be unset on this machine, and its value (a secret, a local folder) must not be written to the new config.
    """
    value = written.value
    if isinstance(value, dict):
        value = {key: _with_environment_held(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_with_environment_held(item) for item in value]
    elif isinstance(value, str):
        value = _ENVIRONMENT.sub(_held, value)
    return replace(written, value=value)


def _held(found: re.Match[str]) -> str:
    before = found.string[: found.start()]
    is_argument = before.count("${") > before.count("}")
    return found.group() if is_argument else f"\ue000{found.group(1)}\ue001"


def _with_environment_released(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_environment_released(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_environment_released(item) for item in value]
    return _HELD.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif path:
        yield path, value


def _line(path: KeyPath, value: Any, written: Node, table: Table, foreign: ForeignConfig) -> Line:
    key = dotted(path)
    decision = _decide(key, value, table, foreign)
    location = written.nearest(path).key_location
    return Line(key=key, value=value, location=location, decision=decision, targets=_targets(decision, key))


def _targets(decision: Decision, key: str) -> tuple[str, ...]:
    if not isinstance(decision, Mapped):
        return ()
    # The keys of a section that is kept as one value keep their names.
    return tuple(key if key.startswith(f"{target}.") else target for target in decision.values)


def _decide(key: str, value: Any, table: Table, foreign: ForeignConfig) -> Decision:
    parts = key.split(".")
    always = next((row for row in table.always if row.covers(parts)), None)
    if always is not None:
        return always.decide(value, foreign)
    off = next((switch for switch in table.switches if switch.covers(parts) and not switch.is_on(foreign)), None)
    if off is not None:
        return Redundant(off.off)
    row = next((row for row in table.rows if row.covers(parts)), None)
    if row is None:
        return Unsupported(_UNKNOWN.format(framework=table.framework))
    given = foreign.get(row.pattern) if row.whole else value
    if given == MISSING and not row.verbatim:
        return Unsupported(f"not set (`{MISSING}`): set it in that config and import again, or set the new key")
    return _filled(row.decide(given, foreign), row, parts)


def _filled(decision: Decision, row: Row, parts: Sequence[str]) -> Decision:
    """The new keys with the wildcards of the pattern filled in."""
    stars = [part for part, given in zip(parts, row.pattern.split("."), strict=False) if given == "*"]
    if not isinstance(decision, Mapped) or not stars:
        return decision
    values = {}
    for key, value in decision.values.items():
        for star in stars:
            key = key.replace("*", star, 1)
        values[key] = value
    return Mapped(values, decision.note)


def _defaults(table: Table, foreign: ForeignConfig) -> list[Line]:
    """Lines for the defaults of the framework that differ from those of rlcore and that the file does not set."""
    lines = []
    algorithm = next((name for name in table.defaults if name in foreign.values), None)
    for key, value in table.defaults.get(algorithm or "", {}).items():
        if _is_silent(foreign, key):
            decision = _decide(key, value, table, foreign)
            lines.append(Line(key=key, value=value, location=None, decision=decision, targets=_targets(decision, key)))
    return lines


def _is_silent(foreign: ForeignConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    value = foreign.get(section, {})
    return not (isinstance(value, Mapping) and name in value)


def _tree(native: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    root: dict[str, Any] = {}
    for key, value in native.items():
        *way, last = key.split(".")
        section = root
        for part in way:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        if value == {} and isinstance(section.get(last), dict):
            continue
        section[last] = dict(value) if isinstance(value, Mapping) else value
    return root


def _in_order(values: dict[str, Any]) -> dict[str, Any]:
    algorithm = [name for name in values if name not in _ORDER]
    return {name: values[name] for name in (*algorithm, *_ORDER) if name in values}


def describe(line: Line) -> str:
    """One line of the list: source location, key, value, new keys and reason."""
    location = str(line.location) if line.location is not None else "(framework default)"
    went = f" -> {', '.join(line.targets)}" if line.targets and line.targets != (line.key,) else ""
    why = f": {line.reason}" if line.reason else ""
    return f"{location}  {line.key} = {show(line.value)}{went}{why}"
