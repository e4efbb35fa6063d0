"""Calls the event hooks of plugins."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from rl_core.plugins import hookspecs
from rl_core.plugins.component import describe
from rl_core.plugins.manager import DISABLE_VARIABLE, PluginManager
from rl_core.plugins.record import Plugin
from rl_train.errors import PluginHookError

EVENT_HOOKS = ("rlcore_run_started", "rlcore_step_finished", "rlcore_run_finished")


def call_event(manager: PluginManager, event: str, /, **arguments: Any) -> None:
    """Call one event hook of every working plugin, the last registered first.

    The remaining plugins are called even if one raises.

    Args:
        manager: The plugins.
        event: The name of the hook: 'rlcore_run_started', 'rlcore_step_finished' or 'rlcore_run_finished'.
        **arguments: All arguments of the hook's specification.

    Raises:
        PluginHookError: Plugins raised; the error names each one, its distribution and its exception.
        ValueError: The event hook does not exist, or the arguments do not match its specification.
    """
    if event not in EVENT_HOOKS:
        raise ValueError(f"There is no event hook {event!r}.")
    parameters = set(inspect.signature(getattr(hookspecs, event)).parameters)
    if set(arguments) != parameters:
        raise ValueError(f"{event} takes {sorted(parameters)}, not {sorted(arguments)}.")
    failures: list[tuple[Plugin, Exception]] = []
    for plugin, implementation in manager.event_hooks(event):
        try:
            implementation.function(*(arguments[name] for name in implementation.argnames))
        except Exception as error:
            failures.append((plugin, error))
    if failures:
        raise _hook_error(event, failures) from failures[0][1]


def _hook_error(event: str, failures: Sequence[tuple[Plugin, Exception]]) -> PluginHookError:
    raised = [f"{event} of the plugin {plugin.name!r} ({plugin.label}) raised {describe(error)}." for plugin, error in failures]
    names = ",".join(plugin.name for plugin, _ in failures)
    return PluginHookError("\n".join([*raised, f"To run without it: {DISABLE_VARIABLE}={names}"]))
