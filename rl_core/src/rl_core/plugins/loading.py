"""Imports one plugin and calls its component hooks; failures become reasons, not exceptions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

from rl_core.errors import PluginError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import Component, Kind, KnownComponent, describe, did_you_mean

HEAVY_MODULES = ("torch", "ray", "numpy", "transformers", "vllm", "megatron", "jax", "tensorflow")
"""Modules that registration must not import: each adds from a tenth of a second to several seconds to every command."""

# A plugin that calls sys.exit() during import must not end the command either.
_WHAT_PLUGINS_RAISE = (Exception, SystemExit)


@dataclass(frozen=True, kw_only=True)
class LoadedModule:
    """Result of loading one plugin: the object with the hooks, or None if the import failed; for the rest see `Plugin`.

    `reason` is what went wrong, or None, and `error` the first exception behind it.
    """

    plugin: Any
    components: tuple[tuple[Kind, Component], ...]
    known: tuple[KnownComponent, ...]
    hooks: tuple[str, ...]
    import_ms: float
    heavy_modules: tuple[str, ...]
    reason: str | None
    error: BaseException | None


def load_module(load: Callable[[], Any]) -> LoadedModule:
    """Call `load`, which returns the object with the hooks, check these, and call the component hooks."""
    heavy_before = _heavy_modules()
    plugin: Any = None
    components: list[tuple[Kind, Component]] = []
    known: list[KnownComponent] = []
    hooks: tuple[str, ...] = ()
    errors: list[tuple[str, BaseException]] = []
    started = time.perf_counter()
    try:
        plugin = load()
    except _WHAT_PLUGINS_RAISE as error:
        errors.append((describe(error), error))
    import_ms = (time.perf_counter() - started) * 1000
    if not errors:
        try:
            callers = _checked_hooks(plugin)
        except PluginError as error:
            errors.append((str(error), error))
        except pluggy.PluginValidationError as error:
            errors.append((" ".join(str(error).split()), error))
        else:
            hooks = tuple(callers)
            for name, function in callers.items():
                if name in hookspecs.KIND_OF_HOOK:
                    _call_noun_hook(name, function, components=components, errors=errors)
                elif name == hookspecs.KNOWN_COMPONENTS_HOOK:
                    _call_known_components(function, known=known, errors=errors)
    return LoadedModule(
        plugin=plugin,
        components=tuple(components),
        known=tuple(known),
        hooks=hooks,
        import_ms=import_ms,
        heavy_modules=tuple(sorted(_heavy_modules() - heavy_before)),
        reason="; ".join(reason for reason, _ in errors) or None,
        error=errors[0][1] if errors else None,
    )


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


def _call_noun_hook(
    name: str, function: Callable[[], Any], *, components: list[tuple[Kind, Component]], errors: list[tuple[str, BaseException]]
) -> None:
    kind = hookspecs.KIND_OF_HOOK[name]
    try:
        returned = list(function())
    except _WHAT_PLUGINS_RAISE as error:
        errors.append((f"{name}() raised {describe(error)}", error))
        return
    seen: set[str] = set()
    for component in returned:
        problem = None
        if not isinstance(component, Component):
            problem = f"{name}() returned {component!r}, which is not a Component"
        elif component.name in seen:
            problem = f"{name}() returned {component.name!r} twice"
        if problem is not None:
            errors.append((problem, PluginError(problem)))
            continue
        seen.add(component.name)
        components.append((kind, component))


def _call_known_components(
    function: Callable[[], Any], *, known: list[KnownComponent], errors: list[tuple[str, BaseException]]
) -> None:
    hook = hookspecs.KNOWN_COMPONENTS_HOOK
    try:
        returned = list(function())
    except _WHAT_PLUGINS_RAISE as error:
        errors.append((f"{hook}() raised {describe(error)}", error))
        return
    for component in returned:
        if isinstance(component, KnownComponent):
            known.append(component)
        else:
            problem = f"{hook}() returned {component!r}, which is not a KnownComponent"
            errors.append((problem, PluginError(problem)))


def _heavy_modules() -> set[str]:
    return {name for name in HEAVY_MODULES if name in sys.modules}
