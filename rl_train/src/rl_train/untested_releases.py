"""Warns of dependencies that are newer than what a distribution was tested with, as its extra `tested` names it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl_core.plugins.record import Plugin, Status


def untested_releases(plugins: Iterable[Plugin]) -> list[str]:
    """One sentence for each dependency of working plugins whose installed release allows, but their tests did not run with."""
    found: dict[str, None] = {}
    for plugin in plugins:
        if plugin.status is not Status.READY:
            continue
        limits = _tested(plugin.distribution)
        for check in plugin.requirements:
            name = Requirement(check.requirement).name
            limit = limits.get(canonicalize_name(name))
            if limit is not None and not limit.contains(str(check.installed), prereleases=True):
                found[f"{name} {check.installed} is newer than the tested releases ({name}{limit})."] = None
    return list(found)


def _tested(distribution: str) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, importlib.metadata.distribution(distribution).requires or ())
    in_extra = (each for each in requirements if each.marker is not None and not each.marker.evaluate({"extra": ""}))
    return {
        canonicalize_name(it.name): it.specifier for it in in_extra if it.marker and it.marker.evaluate({"extra": "tested"})
    }
