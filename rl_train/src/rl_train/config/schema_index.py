"""Every section that a config can have with the installed plugins. Does not read configs.

Used by `rlcore explain`, `rlcore schema` and the reference pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from rl_core.config.introspection import Field, Model
from rl_core.config.source_tree import KeyPath
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind
from rl_core.plugins.record import Status
from rl_core.plugins.registry import Registry
from rl_train.config.config_layout import SectionSchema
from rl_train.config.section_models import section_of
from rl_train.config.section_resolver import BUILT_IN
from rl_train.config.slots import matches, slots_of


@dataclass(frozen=True, kw_only=True)
class SchemaIndex:
    """All sections.

    Attributes:
        sections: Each section of each component, and the built-in ones; one key may have several.
        unusable: One sentence for each component whose model cannot be loaded.
    """

    sections: tuple[SectionSchema, ...]
    unusable: tuple[str, ...]

    def of_kind(self, kind: Kind) -> dict[str, Model]:
        """The models of the components of a kind, by name."""
        return {
            section.component.name: section.model
            for section in self.sections
            if section.kind is kind and section.component is not None
        }

    def find(self, path: KeyPath) -> list[tuple[SectionSchema, Field]]:
        """The fields that a key may refer to: one for each component with that key."""
        candidates = []
        for section in self.sections:
            enclosing = path[: len(section.path)]
            if len(path) > len(enclosing) and matches(section.path, enclosing):
                field = replace(section, path=enclosing).find(path)
                if field is not None:
                    candidates.append((section, field))
        # The backends' own models describe `policy.generation` better than the base model.
        deepest = max((len(section.path) for section, _ in candidates), default=0)
        return [(section, field) for section, field in candidates if len(section.path) == deepest]


def schema_index(registry: Registry, *, plugins: Collection[str] | None = None) -> SchemaIndex:
    """The built-in sections and those of installed, working components.

    Args:
        registry: The plugins.
        plugins: Names of plugins to take components from; all of them by default.
    """
    sections = [SectionSchema(path=(name,), model=model) for name, model in BUILT_IN.items()]
    unusable = []
    for registration in registry.manager.registrations:
        kind, component, plugin = registration.kind, registration.component, registration.plugin
        if not slots_of(kind) or plugin.status is not Status.READY:
            continue
        if plugins is not None and plugin.name not in plugins:
            continue
        try:
            model = section_of(component, kind)
        except PluginError as error:
            unusable.append(str(error))
            continue
        for slot in slots_of(kind):
            path = slot.path if slot.selector is not None else (*slot.path[:-1], component.name)
            sections.append(SectionSchema(path=path, model=model, component=component, kind=kind, implied=slot.implied))
    return SchemaIndex(sections=tuple(sections), unusable=tuple(unusable))
