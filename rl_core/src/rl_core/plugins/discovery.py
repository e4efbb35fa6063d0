"""Finds installed plugins in metadata alone, without importing them."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from rl_core.plugins.record import Plugin
from rl_core.plugins.requirements import version_of

ENTRY_POINT_GROUP = "rl_core.plugins"


def installed_plugins() -> list[tuple[Plugin, EntryPoint, Distribution]]:
    """The installed plugins before their modules are imported, sorted by distribution and name.

    If a distribution is found in several folders, the first one on the path is used, as for `import`. Two versions in one
    folder are reported, because the code may belong to either.
    """
    copies: dict[str, dict[tuple[Path, str], Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        # Reading the text first avoids parsing the files of unrelated distributions, and errors from malformed ones.
        if f"[{ENTRY_POINT_GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            location = Path(str(distribution.locate_file(""))).resolve()
            same_name = copies.setdefault(canonicalize_name(_name(distribution)), {})
            same_name.setdefault((location, version_of(distribution)), distribution)
    plugins = [plugin for folders in copies.values() for plugin in _plugins_of(folders)]
    return sorted(plugins, key=lambda found: (found[0].distribution, found[0].name))


def _plugins_of(copies: dict[tuple[Path, str], Distribution]) -> list[tuple[Plugin, EntryPoint, Distribution]]:
    (location, version), distribution = next(iter(copies.items()))
    name, faults = _name(distribution), []
    if leftover := [other for folder, other in copies if folder == location and other != version]:
        faults.append(
            f"{location} contains metadata of {name} {version} and also of {', '.join(leftover)}: remove the dist-info folder "
            "of the version that is no longer installed"
        )
    origin: dict[str, Any] = {"distribution": name, "version": version, "location": str(location)}
    return [
        (Plugin(name=each.name, module=each.value, faults=[*faults], **origin), each, distribution)
        for each in distribution.entry_points
        if each.group == ENTRY_POINT_GROUP
    ]


def _name(distribution: Distribution) -> str:
    return distribution.metadata["Name"] or "unnamed-distribution"
