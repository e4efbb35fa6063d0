"""The sections of a config: which belong to components (`SLOTS`), and the sections of one config, each with its model.

`SLOTS` is the only list of them. The loader, the JSON schema, the config reference, `rlcore explain` and the rules derive from
it. Attributes of components' classes that they need are read from source files, without importing them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_core.config.diagnostics import KeyPath
from rl_core.config.introspection import NO_DEFAULT, Field, Model, all_fields, find_field
from rl_core.plugins.component import Component, Kind
from rl_core.plugins.import_path import find_module
from rl_train.config.foreign_names import MEANINGS

ANY = "<name>"
"""Placeholder for a key that the user chooses, the last of a path: the task of `env.<name>`."""

FUNCTIONS = "function"
"""The environment whose rewards are plain functions."""
AGENT = "agent"
"""The environment of a task whose agent returns the reward."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A section of a config that belongs to a component, or several with names that the user chooses.

    Attributes:
        path: Its key, which may end in `ANY`.
        kind: Kind of the component.
        selector: Key of the section that has the name of the component; None if it has no such key.
        is_named_by_key: Whether the last key of the path is the name of the component if the section does not select another.
        path_selector: Key of the section with the dotted path of a class, used instead of a registered name.
        selected_by: Keys that select a component if the section has them and no name.
        is_required: Whether the section exists even if the config does not have it.
        implied: Defaults of keys that follow from the path.
    """

    path: KeyPath
    kind: Kind
    selector: str | None = None
    is_named_by_key: bool = False
    path_selector: str | None = None
    selected_by: Mapping[str, str] = field(default_factory=dict)
    is_required: bool = False
    implied: Mapping[str, Any] = field(default_factory=dict)


SLOTS = (
    Slot(path=(ANY,), kind=Kind.ALGORITHM, is_named_by_key=True),
    Slot(path=("loss_fn",), kind=Kind.LOSS, selector="name", is_required=True),
    Slot(path=("policy",), kind=Kind.POLICY, selector="backend", is_required=True),
    Slot(path=("policy", "generation"), kind=Kind.GENERATION, selector="backend"),
    Slot(path=("value",), kind=Kind.POLICY, selector="backend", implied={"head": "scalar", "frozen": False}),
    Slot(path=("teacher",), kind=Kind.POLICY, selector="backend", implied={"head": "tokens", "frozen": True}),
    Slot(path=("teachers", ANY), kind=Kind.POLICY, selector="backend", implied={"head": "tokens", "frozen": True}),
    Slot(path=("data", "train"), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "validation"), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "validation_sets", ANY), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "mix", ANY), kind=Kind.DATASET, selector="dataset_name"),
    Slot(
        path=("env", ANY),
        kind=Kind.ENVIRONMENT,
        selector="name",
        path_selector="env_cls",
        selected_by={"reward_fn": FUNCTIONS, "reward_fns": FUNCTIONS, "agent": AGENT},
        is_named_by_key=True,
    ),
    Slot(path=("logger", "loggers", ANY), kind=Kind.LOGGER, is_named_by_key=True),
)

WITH_NAMES = ("callbacks",)
"""Sections of the runtime that hold sections with names that the user chooses."""
COMPANIONS = {str(slot.path[0]): slot.implied for slot in SLOTS if slot.kind is Kind.POLICY and slot.implied}
"""Sections of models in addition to the policy, with the values that each implies; `teachers` has a section for each task."""
FUNCTION_KEYS = tuple(key for slot in SLOTS for key, name in slot.selected_by.items() if name == FUNCTIONS)
"""Keys of `env.<task>` that select the environment `FUNCTIONS`."""


def slots_of(kind: Kind) -> list[Slot]:
    """The slots of a kind of component."""
    return [slot for slot in SLOTS if slot.kind is kind]


def matches(pattern: KeyPath, path: KeyPath) -> bool:
    """Whether a key is the path of a slot, with any name for `ANY`."""
    return len(pattern) == len(path) and all(key in (name, ANY) for key, name in zip(pattern, path, strict=True))


def is_named_by_user(path: KeyPath) -> bool:
    """Whether a key is a name that the user chooses in a section that accepts any name, such as `env`."""
    patterns = [*(slot.path for slot in SLOTS if slot.path[-1] == ANY), *((name, ANY) for name in WITH_NAMES)]
    return len(path) > 1 and any(matches(pattern, path) for pattern in patterns)


def sections_at(holder: BaseModel, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The sections that a model has at the path of a slot, each with its key; those that are not set are skipped."""
    *parents, last = path
    section: Any = holder
    for key in parents:
        section = getattr(section, str(key))
    if last == ANY:
        yield from (((*parents, name), member) for name, member in section.items())
    elif getattr(section, str(last)) is not None:
        yield path, getattr(section, str(last))


@dataclass(frozen=True, kw_only=True)
class SectionSchema:
    """A section, its model, and the component that it belongs to.

    Attributes:
        path: The section's key.
        model: Its model.
        component: None for the built-in sections.
        kind: The kind of the component.
        implied: Values of keys that follow from the position of the section in the config.
    """

    path: KeyPath
    model: Model
    component: Component | None = None
    kind: Kind | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether the section accepts keys that its model does not define."""
        return self.model.model_config.get("extra") == "allow"

    def find(self, path: KeyPath) -> Field | None:
        """The field at a full key, or None if the section has no such key; its default is the implied value if it has one."""
        found = find_field(self.model, path[len(self.path) :], prefix=self.path)
        return None if found is None else self._with_implied_default(found)

    def fields(self, *, depth: int = 8) -> Iterator[Field]:
        """Every field of the section and of the sections within it, down to a depth."""
        return map(self._with_implied_default, all_fields(self.model, prefix=self.path, depth=depth))

    def _with_implied_default(self, found: Field) -> Field:
        is_own = found.path[:-1] == self.path and not found.is_free
        return replace(found, default=self.implied[found.name]) if is_own and found.name in self.implied else found


@dataclass(frozen=True, kw_only=True)
class ConfigLayout:
    """The sections of a config, and the keys that they may have.

    Attributes:
        sections: By their keys. A section whose component was not found has the model of any component of its kind.
        algorithm: Name of the algorithm; None if it could not be determined.
    """

    sections: dict[KeyPath, SectionSchema]
    algorithm: str | None

    def find(self, path: KeyPath) -> Field | None:
        """The field at a key, or None if no section has such a key."""
        section = self.enclosing_section(path)
        return None if section is None else section.find(path)

    def enclosing_section(self, path: KeyPath) -> SectionSchema | None:
        """The innermost section that contains a key."""
        return next((self.sections[path[:n]] for n in range(len(path) - 1, 0, -1) if path[:n] in self.sections), None)

    def takes_any(self, path: KeyPath) -> bool:
        """Whether a section accepts this key without defining it."""
        if is_named_by_user(path):
            return True
        found, section = self.find(path), self.enclosing_section(path)
        if found is None:
            return section is not None and section.is_open and section.component is not None
        return found.is_free and found.default is NO_DEFAULT

    def default(self, path: KeyPath) -> Any:
        """The value of a key that the file does not set; `NO_DEFAULT` if it is required or there is no such key."""
        found = self.find(path)
        return NO_DEFAULT if found is None else found.default

    def fields(self) -> list[Field]:
        """Every field of every section."""
        return [found for section in self.sections.values() for found in section.fields()]

    def ending_in(self, name: str) -> list[KeyPath]:
        """All full keys that end in this name or else in our name for it, including default keys of free mappings."""
        keys = []
        for item in self.fields():
            if item.name.casefold() == name.casefold():
                keys.append(item.path)
            elif isinstance(item.default, dict) and name in item.default and item.model is None:
                keys.append((*item.path, name))
        return list(dict.fromkeys(keys)) or (self.ending_in(MEANINGS[name]) if name in MEANINGS else [])


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
