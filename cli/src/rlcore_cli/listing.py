"""`rlcore list-backends` and `rlcore list-plugins`: installed plugins and components with their status.

Plugin modules are imported, the targets of components are not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import typer

from rl_core.plugins.component import Kind, Plugin, Registration, Status
from rl_core.plugins.import_path import missing_target
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry, name_collision
from rl_core.plugins.requirements import unmet_needs
from rl_train.plugin_warnings import plugin_warnings
from rlcore_cli.arguments import AsJson, counted

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
    rows += [
        _row(kind=each.kind.value, name=each.name, distribution=each.distribution, status=NOT_INSTALLED, reason=each.install)
        for each in Registry(manager).not_installed()
        if each.kind in kinds
    ]
    rows.sort(key=lambda row: (kinds.index(row["kind"]), row["name"]))
    rows += [_row(plugin) for plugin in manager.broken if not plugin.components]
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
        for finding in plugin_findings(plugin, manager):
            print(f"{finding.status}: {plugin.name} ({plugin.label}): {finding.text}")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in aligned columns. Importing a table library would double the time of the command."""
    for line in aligned(rows):
        print(line)


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """One line for each row, in aligned columns; `right` aligns all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    cells = ([side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


@dataclass(frozen=True)
class Finding:
    """A problem of a plugin, or of a node of a cluster.

    Attributes:
        subject: Name of the plugin, or address of the node; empty if it concerns all.
        check: What was checked.
        text: What was found, and what to do.
        status: Whether the plugin, or a run on the cluster, cannot be used because of it.
    """

    subject: str
    check: str
    text: str
    status: Literal["error", "warning"] = field(default="error", kw_only=True)


_SLOW_IMPORT_MS = 200.0
_LONGEST_TEXT = 60


def plugin_findings(plugin: Plugin, manager: PluginManager) -> Iterator[Finding]:
    """The problems of one plugin, without those in its `reason`. Reads the sources of its targets and imports nothing."""
    if plugin.status is Status.DISABLED:
        return
    error, note = partial(Finding, plugin.name), partial(Finding, plugin.name, "import", status="warning")
    for kind, component in plugin.components:
        same = [each for each in manager.registrations if (each.kind, each.component.name) == (kind, component.name)]
        if len(same) > 1:
            yield error("name", str(name_collision(kind, component.name, same)))
        for reference in (component.target, component.config):
            if reference is not None and (problem := missing_target(reference)) is not None:
                yield error("target", f"{kind.label.capitalize()} {component.name!r}: {reference} does not exist: {problem}")
    if plugin.import_ms is not None and plugin.import_ms > _SLOW_IMPORT_MS:
        yield note(
            f"Importing {plugin.module or plugin.name} took {plugin.import_ms:.0f} ms, which every command waits for. Import "
            "libraries in the targets instead."
        )
    if plugin.printed:
        text = plugin.printed if len(plugin.printed) <= _LONGEST_TEXT else f"{plugin.printed[:_LONGEST_TEXT]}..."
        yield note(f"It prints when it is imported, which is not shown: {text!r}. Remove the print.")


_COLUMNS = ("kind", "name", "plugin", "distribution", "version", "status", "reason", "summary", "target", "config")


def _row(plugin: Plugin | None = None, **known: Any) -> dict[str, Any]:
    """A row with what is known of a plugin, and of a component."""
    row: dict[str, Any] = {**dict.fromkeys(_COLUMNS), "capabilities": []}
    if plugin is not None:
        row |= {"name": plugin.name, "plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
        row |= {"status": plugin.status.value, "reason": plugin.reason}
    return row | known


def _of_registration(registration: Registration) -> dict[str, Any]:
    component, plugin = registration.component, registration.plugin
    problem = unmet_needs(component.needs)
    lacking = {"status": NOT_INSTALLED, "reason": plugin.reason or component.install or problem}
    return _row(
        plugin,
        kind=registration.kind.value,
        name=component.name,
        summary=component.summary,
        target=component.target,
        config=component.config,
        capabilities=list(component.capabilities),
        **({} if problem is None else lacking),
    )


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
        "problems": [finding.text for finding in plugin_findings(plugin, manager)],
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
