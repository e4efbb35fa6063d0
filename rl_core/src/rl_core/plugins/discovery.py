"""Finds installed plugins in metadata alone, without importing them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

from packaging.utils import canonicalize_name

ENTRY_POINT_GROUP = "rl_core.plugins"


@dataclass(frozen=True, kw_only=True)
class InstalledPlugin:
    """One entry point of the group, before its module is imported.

    `location` is the folder of the metadata, `leftover` other versions with metadata there, left by broken upgrades.
    """

    entry_point: importlib.metadata.EntryPoint
    distribution: importlib.metadata.Distribution
    location: Path
    leftover: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return _name(self.distribution)

    @property
    def version(self) -> str:
        """The version of the distribution."""
        return version_of(self.distribution)


def installed_plugins() -> list[InstalledPlugin]:
    """The installed plugins, sorted by distribution and name.

    If a distribution is found in several folders, the first one on the path is used, as for `import`. Two versions in one
    folder are reported, because the code may belong to either.
    """
    copies: dict[str, dict[tuple[Path, str], importlib.metadata.Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        # Reading the text first avoids parsing the files of unrelated distributions, and errors from malformed ones.
        if f"[{ENTRY_POINT_GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            location = Path(str(distribution.locate_file(""))).resolve()
            same_name = copies.setdefault(canonicalize_name(_name(distribution)), {})
            same_name.setdefault((location, version_of(distribution)), distribution)
    plugins = [plugin for folders in copies.values() for plugin in _plugins_of(folders)]
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.entry_point.name))


def _plugins_of(copies: dict[tuple[Path, str], importlib.metadata.Distribution]) -> list[InstalledPlugin]:
    (location, version), distribution = next(iter(copies.items()))
    leftover = tuple(other for folder, other in copies if folder == location and other != version)
    return [
        InstalledPlugin(entry_point=entry_point, distribution=distribution, location=location, leftover=leftover)
        for entry_point in distribution.entry_points
        if entry_point.group == ENTRY_POINT_GROUP
    ]


def _name(distribution: importlib.metadata.Distribution) -> str:
    return distribution.metadata["Name"] or "unnamed-distribution"


def version_of(distribution: importlib.metadata.Distribution) -> str:
    """Its version, read from the headers: `distribution.version` parses the description too, which takes milliseconds."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return message_from_string(text.partition("\n\n")[0])["Version"] or "unknown"
