"""The sections of one config, each with its model: looks up keys and their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.config.introspection import NO_DEFAULT, Field, Model, all_fields, find_field
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Component, Kind
from rl_train.config.foreign_names import MEANINGS
from rl_train.config.slots import is_named_by_user


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
