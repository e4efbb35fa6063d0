"""Loads each plugin separately, so that a broken one does not affect the others.

Environment variables: `RLCORE_DISABLE_PLUGINS=a,b` disables the plugins (or distributions) of these names;
`RLCORE_STRICT_PLUGINS=1` makes every failure fatal.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement
from packaging.utils import canonicalize_name

from rl_core.errors import BrokenPluginError, PluginError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import describe, did_you_mean
from rl_core.plugins.loading import load_plugin
from rl_core.plugins.record import Plugin, Registration, Status
from rl_core.plugins.requirements import check_one_of, check_requirements, version_of

ENTRY_POINT_GROUP = "rl_core.plugins"
DISABLE_VARIABLE = "RLCORE_DISABLE_PLUGINS"
STRICT_VARIABLE = "RLCORE_STRICT_PLUGINS"


class PluginManager:
    """The plugins of this process with their components and status, and the event hooks of those that work.

    Attributes:
        plugins: Every plugin found, including broken and disabled ones, in the order in which they were added.
        warnings: Harmless irregularities, one sentence each.
    """

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []
        self.warnings: list[str] = []
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)
        self._by_hook_name: dict[str, Plugin] = {}

    @property
    def registrations(self) -> list[Registration]:
        """Every component of every plugin, including broken plugins."""
        return [registration for plugin in self.plugins for registration in plugin.registrations]

    @property
    def broken(self) -> list[Plugin]:
        """Plugins that are enabled but do not work."""
        return [plugin for plugin in self.plugins if plugin.status in (Status.MISSING, Status.FAILED)]

    def add(self, name: str, load: Callable[[], Any], **fields: Any) -> Plugin:
        """As `load` of a `Plugin` with these fields."""
        return self.load(Plugin(name=name, **fields), load)

    def load(self, plugin: Plugin, load: Callable[[], Any]) -> Plugin:
        """Load one plugin and register its components; an exception becomes its status.

        `load` returns the object with the hooks, usually by importing a module.
        """
        loaded = load_plugin(plugin, load)
        alternatives = dict.fromkeys((c.one_of, c.install) for _, c in plugin.components if c.one_of)
        plugin.requirements += tuple(check_one_of(one_of, install=install) for one_of, install in alternatives)
        self.plugins.append(plugin)
        if plugin.status is Status.READY:
            hook_name = f"{plugin.distribution}:{plugin.name}:{len(self.plugins)}"
            self._by_hook_name[hook_name] = plugin
            self._hooks.register(loaded, name=hook_name)
        return plugin

    def event_hooks(self, event: str) -> list[tuple[Plugin, Any]]:
        """The working plugins that implement an event hook, the last registered first, each with pluggy's `HookImpl`."""
        implementations = getattr(self._hooks.hook, event).get_hookimpls()
        return [(self._by_hook_name[each.plugin_name], each) for each in reversed(implementations)]

    def raise_if_broken(self) -> None:
        """Raise if any plugin does not work (strict mode).

        Raises:
            BrokenPluginError: Lists each such plugin with its reason.
        """
        if self.broken:
            lines = [f"  {plugin.name} ({plugin.label}): {plugin.reason}" for plugin in self.broken]
            raise BrokenPluginError(
                f"{STRICT_VARIABLE} is set and these plugins do not work:\n" + "\n".join(lines) + "\n"
                f"Fix or uninstall them, disable them with {DISABLE_VARIABLE}, or unset {STRICT_VARIABLE}. "
                "`rlcore doctor` shows more."
            )


def discover(*, strict: bool | None = None) -> PluginManager:
    """Find and load every installed plugin; imports only their light modules.

    Raises:
        BrokenPluginError: If a plugin does not work and `strict` is set, by default by `RLCORE_STRICT_PLUGINS`.
        PluginError: `RLCORE_STRICT_PLUGINS` is neither true nor false.
    """
    manager = PluginManager()
    disabled = {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}
    unused = set(disabled)
    for plugin, entry_point, distribution in installed_plugins():
        canonical = canonicalize_name(plugin.distribution)
        matches = {name for name in disabled if name == plugin.name or canonicalize_name(name) == canonical}
        unused -= matches
        if matches:
            plugin.is_disabled = True
            manager.plugins.append(plugin)
            continue
        try:
            plugin.requirements = check_requirements(distribution)
        except InvalidRequirement as error:
            plugin.faults.append(f"its metadata has an invalid requirement: {describe(error)}")
        manager.load(plugin, entry_point.load)
    names = [name for plugin in manager.plugins for name in (plugin.name, plugin.distribution)]
    manager.warnings.extend(
        f"{DISABLE_VARIABLE} names {name!r}, which is not a plugin.{did_you_mean(name, names)}" for name in sorted(unused)
    )
    if _strict_from_environment() if strict is None else strict:
        manager.raise_if_broken()
    return manager


def _strict_from_environment() -> bool:
    value = os.environ.get(STRICT_VARIABLE, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise PluginError(f"{STRICT_VARIABLE}={value} is neither true nor false: use 1 or 0.")


def installed_plugins() -> list[tuple[Plugin, EntryPoint, Distribution]]:
    """The installed plugins by their metadata, before their modules are imported, sorted by distribution and name.

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
