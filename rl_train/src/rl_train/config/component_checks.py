"""Runs the `conflicts` checks of all component sections."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import PolicyConfig
from rl_core.config.section import ComponentSection
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Kind
from rl_train.config.schema import LoggerConfig, RunConfig
from rl_train.config.slots import SLOTS, sections_at, slots_of

Finding = tuple[KeyPath, str]
"""A key, and what is wrong with it."""


def component_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Conflicts reported by the sections of backends, datasets, environments, losses and loggers."""
    for path, section in sections_of(run):
        for inner, message in section.conflicts(run):
            yield (*path, *inner), message


def models_of(run: RunConfig) -> dict[str, PolicyConfig]:
    """The policy and its companion models, by section name."""
    return {str(slot.path[0]): model for slot in slots_of(Kind.POLICY) for _, model in sections_at(run, slot.path)}


def sections_of(run: RunConfig) -> Iterator[tuple[KeyPath, ComponentSection]]:
    """The sections of components, each with its key, without those of the algorithm and of disabled loggers."""
    for slot in SLOTS:
        if slot.kind is not Kind.ALGORITHM:
            for path, section in sections_at(run, slot.path):
                if not isinstance(section, LoggerConfig) or section.enabled:
                    yield path, section
