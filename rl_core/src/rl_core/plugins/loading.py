"""Imports one plugin and calls its component hooks; failures become reasons, not exceptions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pluggy

from rl_core.errors import PluginError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import Component, Kind, KnownComponent, describe, did_you_mean

HEAVY_MODULES = ("torch", "ray", "numpy", "transformers", "vllm", "megatron", "jax", "tensorflow")
"""Modules that registration must not import: each adds from a tenth of a second to several seconds to every command."""

T = TypeVar("T")

# A plugin that calls sys.exit() during import must not end the command either.
_WHAT_PLUGINS_RAISE = (Exception, SystemExit)


@dataclass(kw_only=True)
class LoadedModule:
    """Result of loading one plugin: the object with the hooks, or None if the import failed; for the rest see `Plugin`.

    `errors` are what went wrong, each with the exception behind it.
    """

    plugin: Any = None
    components: list[tuple[Kind, Component]] = field(default_factory=list)
    known: list[KnownComponent] = field(default_factory=list)
    hooks: tuple[str, ...] = ()
    import_ms: float = 0.0
    heavy_modules: tuple[str, ...] = ()
    errors: list[tuple[str, BaseException]] = field(default_factory=list)

    def call_component_hooks(self) -> None:
        """Check the hooks, and call those that return components."""
        try:
            callers = _checked_hooks(self.plugin)
        except PluginError as error:
            self.errors.append((str(error), error))
            return
        except pluggy.PluginValidationError as error:
            self.errors.append((" ".join(str(error).split()), error))
            return
        self.hooks = tuple(callers)
        for name, function in callers.items():
            if name in hookspecs.KIND_OF_HOOK:
                self._add_components(name, self._returned(name, function, Component))
            elif name == hookspecs.KNOWN_COMPONENTS_HOOK:
                self.known += self._returned(name, function, KnownComponent)

    def _add_components(self, hook: str, returned: list[Component]) -> None:
        seen: set[str] = set()
        for component in returned:
            if component.name in seen:
                self._reject(f"{hook}() returned {component.name!r} twice")
            else:
                seen.add(component.name)
                self.components.append((hookspecs.KIND_OF_HOOK[hook], component))

    def _returned(self, hook: str, function: Callable[[], Any], expected: type[T]) -> list[T]:
        """What a hook returned, without items of another class, which are errors."""
        try:
            returned = list(function())
        except _WHAT_PLUGINS_RAISE as error:
            self.errors.append((f"{hook}() raised {describe(error)}", error))
            return []
        for item in returned:
            if not isinstance(item, expected):
                self._reject(f"{hook}() returned {item!r}, which is not a {expected.__name__}")
        return [item for item in returned if isinstance(item, expected)]

    def _reject(self, problem: str) -> None:
        self.errors.append((problem, PluginError(problem)))


def load_module(load: Callable[[], Any]) -> LoadedModule:
    """Call `load`, which returns the object with the hooks, check these, and call the component hooks."""
    heavy_before, loaded, started = _heavy_modules(), LoadedModule(), time.perf_counter()
    try:
        loaded.plugin = load()
    except _WHAT_PLUGINS_RAISE as error:
        loaded.errors.append((describe(error), error))
    loaded.import_ms = (time.perf_counter() - started) * 1000
    if not loaded.errors:
        loaded.call_component_hooks()
    loaded.heavy_modules = tuple(sorted(_heavy_modules() - heavy_before))
    return loaded


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


def _heavy_modules() -> set[str]:
    return {name for name in HEAVY_MODULES if name in sys.modules}
