"""Warnings about installed plugins that work: settings without an effect, and dependencies that they were not tested with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl_core.plugins.component import Plugin, Status
from rl_core.plugins.manager import PluginManager


def plugin_warnings(manager: PluginManager) -> list[str]:
    """The warnings of the manager, and one for each installed release that the extra `tested` of a distribution excludes."""
    untested = (text for plugin in manager.plugins if plugin.status is Status.READY for text in _untested(plugin))
    return list(dict.fromkeys([*manager.warnings, *untested]))


def _untested(plugin: Plugin) -> Iterator[str]:
    limits = _tested(plugin.distribution)
    for check in plugin.requirements:
        name = Requirement(check.requirement).name
        limit = limits.get(canonicalize_name(name))
        if limit is not None and not limit.contains(str(check.installed), prereleases=True):
            yield f"{name} {check.installed} is not among the tested releases ({name}{limit})."


def _tested(distribution: str) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, importlib.metadata.distribution(distribution).requires or ())
    in_extra = (each for each in requirements if each.marker is not None and not each.marker.evaluate({"extra": ""}))
    return {
        canonicalize_name(it.name): it.specifier for it in in_extra if it.marker and it.marker.evaluate({"extra": "tested"})
    }
