"""`rlcore list-backends` and `rlcore list-plugins`: installed plugins and components with their status.

Plugin modules are imported, the targets of components are not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rl_core.plugins.component import Kind, Plugin, Registration
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs
from rl_train.plugin_warnings import plugin_warnings
from rlcore_cli.arguments import AsJson, counted
from rlcore_cli.check_plugin import problems_of

NOT_INSTALLED = "not installed"

WithTimings = Annotated[
    bool, typer.Option("--timings", help="Show the import time of each plugin and the heavy modules it imports.")
]


def list_backends(
    everything: Annotated[
        bool, typer.Option("--all", help="List all kinds of components: environments, algorithms, losses, datasets, ...")
    ] = False,
    as_json: AsJson = False,
    timings: WithTimings = False,
) -> None:
    """List the policy and generation backends that a config can use, and their status.

    Uses only the registrations and metadata of the plugins, so no heavy library is imported.

    Example:
        rlcore list-backends
        rlcore list-backends --all --json
    """
    manager = discover()
    kinds = list(Kind) if everything else [Kind.POLICY, Kind.GENERATION]
    rows = [_of_registration(r) for r in manager.registrations if r.kind in kinds]
    rows += _absent_rows(Registry(manager), kinds)
    rows.sort(key=lambda row: (kinds.index(row["kind"]), row["name"]))
    rows += [_of_broken(plugin) for plugin in manager.broken if not plugin.components]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ["kind", "name", "distribution", "status", "note"]
    print_table([[row[column] or "?" for column in columns] for row in map(_readable, rows)])
    if not everything:
        _print_other_kinds(manager)
    if timings:
        _print_timings(manager.plugins)
    _print_troubles(manager)


def list_plugins(
    everything: Annotated[bool, typer.Option("--all", help="Include the core plugin, and list every component.")] = False,
    as_json: AsJson = False,
    timings: WithTimings = False,
) -> None:
    """List the installed plugins: distribution, status, hooks and components.

    Example:
        rlcore list-plugins
        rlcore list-plugins --all --timings
    """
    manager = discover()
    plugins = [plugin for plugin in manager.plugins if everything or plugin.distribution != "rl-core"]
    if as_json:
        print(json.dumps([_of_plugin(plugin, manager) for plugin in plugins], indent=2))
        return
    print_table([[p.name, p.label, p.status.value, p.reason or _contents(p)] for p in plugins])
    if everything:
        print()
        print_table([[p.name, r.kind.value, r.component.name, r.component.target] for p in plugins for r in p.registrations])
    if timings:
        _print_timings(plugins)
    _print_troubles(manager)
    for plugin in plugins:
        for problem in problems_of(plugin, manager):
            print(f"{'error' if problem.is_error else 'warning'}: {plugin.name} ({plugin.label}): {problem.text}")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in aligned columns. Importing a table library would double the time of the command."""
    for line in aligned(rows):
        print(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _of_registration(registration: Registration) -> dict[str, Any]:
    component, plugin = registration.component, registration.plugin
    problem = unmet_needs(component.needs)
    return {
        "kind": registration.kind.value,
        "name": component.name,
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": plugin.status.value if problem is None else NOT_INSTALLED,
        "reason": plugin.reason or (component.install or problem if problem is not None else None),
        "summary": component.summary,
        "target": component.target,
        "config": component.config,
        "capabilities": list(component.capabilities),
    }


def _absent_rows(registry: Registry, kinds: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            **_nothing(),
            "kind": component.kind.value,
            "name": component.name,
            "distribution": component.distribution,
            "status": NOT_INSTALLED,
            "reason": component.install,
        }
        for component in registry.not_installed()
        if component.kind in kinds
    ]


def _of_broken(plugin: Plugin) -> dict[str, Any]:
    return {
        **_nothing(),
        "name": plugin.name,
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": plugin.status.value,
        "reason": plugin.reason,
    }


def _nothing() -> dict[str, Any]:
    absent = ("kind", "name", "plugin", "distribution", "version", "status", "reason", "summary", "target", "config")
    return {**dict.fromkeys(absent), "capabilities": []}


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    label = f"{row['distribution']} {row['version'] or ''}".strip()
    return {**row, "distribution": label, "note": row["reason"] or row["summary"]}


def _of_plugin(plugin: Plugin, manager: PluginManager) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "module": plugin.module,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "location": plugin.location,
        "status": plugin.status.value,
        "reason": plugin.reason,
        "hooks": list(plugin.hooks),
        "components": [{"kind": r.kind.value, "name": r.component.name} for r in plugin.registrations],
        "import_ms": None if plugin.import_ms is None else round(plugin.import_ms, 3),
        "heavy_modules": list(plugin.heavy_modules),
        "problems": [problem.text for problem in problems_of(plugin, manager)],
    }


def _contents(plugin: Plugin) -> str:
    counts = Counter(registration.kind.label for registration in plugin.registrations)
    words = [counted(count, label) for label, count in counts.items()]
    events = [hook for hook in plugin.hooks if hook.startswith(("rlcore_run_", "rlcore_step_"))]
    return ", ".join([*words, *events]) or "no components"


def _print_other_kinds(manager: PluginManager) -> None:
    others = Counter(r.kind.label for r in manager.registrations if r.kind not in ("policy", "generation"))
    if others:
        counts = ", ".join(counted(count, label) for label, count in others.items())
        print(f"\nAlso installed: {counts}. To list them: rlcore list-backends --all")


def _print_timings(plugins: Sequence[Plugin]) -> None:
    print()
    for plugin in plugins:
        if plugin.import_ms is not None:
            heavy = f"  heavy: {', '.join(plugin.heavy_modules)}" if plugin.heavy_modules else ""
            print(f"{plugin.import_ms:8.1f} ms  {plugin.name} ({plugin.module}){heavy}")


def _print_troubles(manager: PluginManager) -> None:
    broken = manager.broken
    if broken:
        noun = "plugin does" if len(broken) == 1 else "plugins do"
        print(f"\n{len(broken)} {noun} not work. To see why: rlcore doctor {broken[0].name}")
    for warning in plugin_warnings(manager):
        print(f"warning: {warning}")
