"""`rlcore doctor`: examines plugins one fact at a time and shows the traceback of what is broken. It mends nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rl_core.plugins
from rlcore_cli.listing import print_table

if TYPE_CHECKING:
    from rl_core.plugins import Component
    from rl_core.plugins.manager import PluginManager
    from rl_core.plugins.record import Plugin

_PLUGINS_FOLDER = Path(rl_core.plugins.__file__).parent
_IMPORTLIB_FOLDER = Path(importlib.__file__).parent
_METADATA_FOLDER = Path(importlib.metadata.__file__).parent


def doctor(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A plugin, a distribution, a component or a dotted path; all plugins where it is left out."
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Import the targets and configs of its components too; takes seconds.")
    ] = False,
) -> None:
    """Show what a plugin requires, whether it can be imported, and the traceback where it cannot.

    The exit code is 1 where anything is unhealthy.

    Example:
        rlcore doctor
        rlcore doctor hf --deep
    """
    from rl_core.plugins.component import Component, is_path
    from rl_core.plugins.manager import discover

    if name is not None and is_path(name):
        healthy = _examine_target(Component.from_path(name))
    else:
        # Not strict, whatever the environment says: the doctor is whom one asks when strictness stopped the command.
        manager = discover(strict=False)
        verdicts = [_examine(plugin, deep=deep) for plugin in _chosen(manager, name)]
        healthy = all(verdicts)
        for warning in manager.warnings:
            print(f"warning: {warning}")
        if name is None:
            _print_open_ports()
    if not healthy:
        raise typer.Exit(1)


def _chosen(manager: PluginManager, name: str | None) -> list[Plugin]:
    from rl_core.errors import UnknownComponentError
    from rl_core.plugins.component import did_you_mean
    from rl_core.plugins.registry import DISTRIBUTION_OF, how_to_install

    if name is None:
        return list(manager.plugins)
    chosen = [
        plugin
        for plugin in manager.plugins
        if name in (plugin.name, plugin.distribution, *(r.component.name for r in plugin.registrations))
    ]
    if chosen:
        return chosen
    for (kind, known), distribution in DISTRIBUTION_OF.items():
        if name in (known, distribution):
            raise UnknownComponentError(
                f"The {kind.label} {known!r} is not installed, so there is nothing to examine: {how_to_install(distribution)}."
            )
    known_names = sorted({n for plugin in manager.plugins for n in (plugin.name, plugin.distribution)})
    raise UnknownComponentError(
        f"No plugin, distribution or component is named {name!r}.{did_you_mean(name, known_names)} "
        f"Plugins: {', '.join(plugin.name for plugin in manager.plugins)}."
    )


def _examine(plugin: Plugin, *, deep: bool) -> bool:
    from rl_core.plugins.record import Status

    print(f"{plugin.name}  {plugin.label}  {plugin.status.value}")
    print(f"  in      {plugin.location}")
    if plugin.status is Status.DISABLED:
        print(f"  {plugin.reason}\n")
        return True
    print("  needs")
    print_table(
        [
            ["    ok" if check.fits else "    WRONG", check.requirement, check.installed or "not installed"]
            for check in plugin.requirements
        ]
    )
    print(f"  import  {plugin.module}  {plugin.import_ms:.1f} ms")
    if plugin.heavy_modules:
        print(f"  HEAVY   importing it brought in {', '.join(plugin.heavy_modules)}: every command pays for that")
    for hook in plugin.hooks:
        print(f"  hook    {hook}")
    targets_healthy = [_examine_component(r.kind.value, r.component, deep=deep) for r in plugin.registrations]
    if plugin.reason is not None:
        print(f"  {plugin.status.value.upper()}  {plugin.reason}")
    _print_remedy(plugin)
    if plugin.error is not None:
        _print_traceback(plugin.error)
    print()
    return plugin.status is Status.READY and not plugin.heavy_modules and all(targets_healthy)


def _examine_component(kind: str, component: Component, *, deep: bool) -> bool:
    from rl_core.plugins.requirements import unmet_needs

    print(f"  {kind} {component.name}  {component.target}")
    problem = unmet_needs(component.needs)
    if problem is not None:
        print(f"    not usable here: {problem}{f': {component.install}' if component.install else ''}")
    return _examine_target(component) if deep else True


def _examine_target(component: Component) -> bool:
    """Imports config and target, in this order, and prints what each took or how it failed."""
    from rl_core.errors import ComponentImportError

    healthy = True
    for reference, load in ((component.config, component.load_config), (component.target, component.load)):
        if reference is None:
            continue
        started = time.perf_counter()
        try:
            load()
        except ComponentImportError as error:
            healthy = False
            print(f"    FAILED  {reference}")
            _print_traceback(error.__cause__ or error)
        else:
            print(f"    ok      {reference}  {(time.perf_counter() - started) * 1000:.0f} ms")
    return healthy


def _print_open_ports() -> None:
    """What of a run can be reached from other machines; docs/security.md says more."""
    print("network")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        print(f"  open    RAY_ADDRESS={address}: every port of the run, as Ray has no passwords; use a private network")
    else:
        print("  ok      Ray, gloo, NCCL and torch's stores of a run on this machine listen on the loopback interface only")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            interface = os.environ.get(variable)
            if interface is not None and not interface.startswith("lo"):
                print(f"  open    {variable}={interface}: unset it for a run on this machine")
    print("  open    vLLM's own process group store, one port for each engine; block it with a firewall")


def _print_remedy(plugin: Plugin) -> None:
    unfit = [check for check in plugin.requirements if not check.fits]
    wanted = [f"'{check.requirement}'" for check in unfit if check.install is None]
    if wanted:
        print(f"  try     pip install {' '.join(wanted)}")
    for check in unfit:
        if check.install is not None:
            print(f"  try     {check.install}")


def _print_traceback(error: BaseException) -> None:
    # The frames of whoever imports the plugin come first and say nothing about it.
    own = error.__traceback__
    while own is not None and own.tb_next is not None and _is_importer(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    for line in "".join(traceback.format_exception(error.with_traceback(own))).splitlines():
        print(f"    {line}")


def _is_importer(filename: str) -> bool:
    folder = Path(filename).parent
    return filename.startswith("<frozen importlib") or folder in (_PLUGINS_FOLDER, _IMPORTLIB_FOLDER, _METADATA_FOLDER)
