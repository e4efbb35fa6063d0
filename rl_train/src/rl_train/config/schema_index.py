"""Every section that a config can have with the installed plugins. Does not read configs.

Used by `rlcore explain`, `rlcore schema` and the reference pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rl_core.config.introspection import Field, Model, find_field
from rl_core.config.source_tree import KeyPath
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind
from rl_core.plugins.record import Status
from rl_core.plugins.registry import Registry
from rl_train.config.section_resolver import SECTIONS, SectionSchema, section_of

ANY = "<name>"
"""Placeholder for a key that the user chooses: the task of `env.<name>`."""

_SECTION_KEYS: dict[Kind, tuple[KeyPath, ...]] = {
    Kind.ALGORITHM: (),
    Kind.LOSS: (("loss_fn",),),
    Kind.POLICY: (("policy",), ("value",), ("teacher",)),
    Kind.GENERATION: (("policy", "generation"),),
    Kind.DATASET: (("data", "train"), ("data", "validation"), ("data", "mix", ANY), ("data", "validation_sets", ANY)),
    Kind.ENVIRONMENT: (("env", ANY),),
    Kind.LOGGER: (),
}
"""Keys of the section of each kind of component; if empty, the component's name is its key."""


@dataclass(frozen=True, kw_only=True)
class SchemaIndex:
    """All sections.

    Attributes:
        parts: Each section of each component, and the built-in ones; one key may have several.
        unusable: One sentence for each component whose model cannot be loaded.
    """

    parts: tuple[SectionSchema, ...]
    unusable: tuple[str, ...]

    def of_kind(self, kind: Kind) -> dict[str, Model]:
        """The models of the components of a kind, by name."""
        return {part.component.name: part.model for part in self.parts if part.kind is kind and part.component is not None}

    def find(self, path: KeyPath) -> list[tuple[SectionSchema, Field]]:
        """The fields that a key may refer to: one for each component with that key."""
        found = []
        for part in self.parts:
            if len(path) > len(part.path) and all(a in (b, ANY) for a, b in zip(part.path, path, strict=False)):
                prefix = path[: len(part.path)]
                field = find_field(part.model, path[len(prefix) :], prefix=prefix)
                if field is not None:
                    found.append((part, field))
        # The backends' own models describe `policy.generation` better than the base model.
        deepest = max((len(part.path) for part, _ in found), default=0)
        return [(part, field) for part, field in found if len(part.path) == deepest]


def schema_index(registry: Registry, *, plugins: Collection[str] | None = None) -> SchemaIndex:
    """The built-in sections and those of installed, working components.

    Args:
        registry: The plugins.
        plugins: Names of plugins to take components from; all of them by default.
    """
    parts = [SectionSchema(path=(name,), model=model) for name, model in SECTIONS.items() if model is not None]
    unusable = []
    for registration in registry.manager.registrations:
        kind, component, plugin = registration.kind, registration.component, registration.plugin
        if kind not in _SECTION_KEYS or plugin.status is not Status.READY:
            continue
        if plugins is not None and plugin.name not in plugins:
            continue
        try:
            model = section_of(component, kind)
        except PluginError as error:
            unusable.append(str(error))
            continue
        own = ("logger", "loggers", component.name) if kind is Kind.LOGGER else (component.name,)
        for path in _SECTION_KEYS[kind] or (own,):
            parts.append(SectionSchema(path=path, model=model, component=component, kind=kind))
    return SchemaIndex(parts=tuple(parts), unusable=tuple(unusable))
