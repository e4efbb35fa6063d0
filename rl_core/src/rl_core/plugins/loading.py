"""Imports one plugin and calls its component hooks; failures become faults of the plugin, not exceptions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, NoReturn, TypeVar

import pluggy

from rl_core.errors import PluginError
from rl_core.plugins import hookspecs
from rl_core.plugins.component import Component, KnownComponent, describe, did_you_mean
from rl_core.plugins.record import Plugin

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
