"""Loads each plugin separately: a failure of its import or of its hooks becomes its status and affects no other plugin.

Environment variables: `RLCORE_DISABLE_PLUGINS=a,b` disables the plugins (or distributions) of these names;
`RLCORE_STRICT_PLUGINS=1` makes every failure fatal.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import Distribution, EntryPoint
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pluggy
from packaging.requirements import InvalidRequirement
from packaging.utils import canonicalize_name

from rl_core.errors import BrokenPluginError, PluginError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import Component, KnownComponent, Plugin, Registration, Status, describe, did_you_mean
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


HEAVY_MODULES = frozenset({"torch", "ray", "numpy", "transformers", "vllm", "megatron", "jax", "tensorflow"})
"""Modules that registration must not import: each adds from a tenth of a second to several seconds to every command."""

T = TypeVar("T")

# A plugin that ends the interpreter when it is imported must not end the command.
_WHAT_PLUGINS_RAISE = (Exception, SystemExit)


def load_plugin(plugin: Plugin, load: Callable[[], Any]) -> Any:
    """Call `load`, which returns the object with the hooks, check these, and call the component hooks.

    Fills in `plugin`, and returns the object with the hooks; None if it could not be imported.
    """
    heavy_before, loaded, started = HEAVY_MODULES & sys.modules.keys(), None, time.perf_counter()
    with _contained(plugin):
        try:
            loaded = load()
        except _WHAT_PLUGINS_RAISE as error:
            _fail(plugin, describe(error), error)
        plugin.import_ms = (time.perf_counter() - started) * 1000
        if not plugin.error:
            _call_component_hooks(plugin, loaded)
    plugin.heavy_modules = tuple(sorted(HEAVY_MODULES & sys.modules.keys() - heavy_before))
    return loaded


@contextmanager
def _contained(plugin: Plugin) -> Iterator[None]:
    """Record what the plugin prints instead of showing it, since a command may print JSON; make `os._exit` raise."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(f"it calls os._exit({status})")

    own, os._exit = os._exit, leave
    try:
        with redirect_stdout(StringIO()) as printed:
            yield
    finally:
        os._exit = own
        plugin.printed = printed.getvalue().strip()


def _fail(plugin: Plugin, fault: str, error: BaseException | None = None) -> None:
    plugin.faults.append(fault)
    plugin.error = plugin.error or error or PluginError(fault)


def _call_component_hooks(plugin: Plugin, loaded: Any) -> None:
    try:
        callers = _checked_hooks(loaded)
    except (PluginError, pluggy.PluginValidationError) as error:
        _fail(plugin, " ".join(str(error).split()), error)
        return
    plugin.hooks = tuple(callers)
    for name, function in callers.items():
        if name in hookspecs.KIND_OF_HOOK:
            kind, seen = hookspecs.KIND_OF_HOOK[name], set[str]()
            for component in _returned(plugin, name, function, Component):
                if component.name in seen:
                    _fail(plugin, f"{name}() returned {component.name!r} twice")
                else:
                    plugin.components.append((kind, component))
                seen.add(component.name)
        elif name == "rlcore_known_components":
            plugin.known += _returned(plugin, name, function, KnownComponent)


def _returned(plugin: Plugin, hook: str, function: Callable[[], Any], expected: type[T]) -> list[T]:
    """What a hook returned, without items of another class, which are faults."""
    try:
        returned = list(function())
    except _WHAT_PLUGINS_RAISE as error:
        _fail(plugin, f"{hook}() raised {describe(error)}", error)
        return []
    for item in returned:
        if not isinstance(item, expected):
            _fail(plugin, f"{hook}() returned {item!r}, which is not a {expected.__name__}")
    return [item for item in returned if isinstance(item, expected)]


def _checked_hooks(plugin: Any) -> dict[str, Callable[[], Any]]:
    """The hook functions of one plugin by name; raises for unknown, unmarked or unsuitable ones.

    The check uses a separate manager: after rejecting a plugin, a manager still contains its other hooks.
    """
    trial = pluggy.PluginManager(hookspecs.PROJECT)
    trial.add_hookspecs(hookspecs)
    specified = sorted(vars(trial.hook))
    trial.register(plugin)
    for name in sorted(vars(trial.hook)):
        if name not in specified and any(not hook.optionalhook for hook in getattr(trial.hook, name).get_hookimpls()):
            raise PluginError(f"unknown hook {name!r}.{did_you_mean(name, specified)}")
    trial.check_pending()
    callers = {}
    for caller in trial.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            if implementation.hookwrapper or implementation.wrapper:
                raise PluginError(f"{caller.name} is a wrapper; the hooks of {hookspecs.PROJECT} are called one by one")
            if caller.has_spec():
                callers[caller.name] = implementation.function
    for name in specified:
        if name not in callers and callable(getattr(plugin, name, None)):
            raise PluginError(f"{name} has no @hookimpl, so it is not a hook")
    return callers
