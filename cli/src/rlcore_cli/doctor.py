"""`rlcore doctor`: checks the installed plugins, with tracebacks of what is broken, this machine and its open ports.

It changes nothing. `cluster_check` has the part about the nodes of a cluster.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rl_core.plugins
from rl_core.errors import PluginError, UnknownComponentError, UserError
from rl_core.plugins.component import Component, Kind, Plugin, Status, did_you_mean, is_path
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import RequirementCheck, check_requirements, unmet_needs, version_of
from rl_train.plugin_warnings import plugin_warnings
from rlcore_cli.arguments import Overrides, counted
from rlcore_cli.listing import plugin_findings, print_table


def doctor(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A plugin, distribution, component or import path; all plugins by default. With --cluster, a config.",
        ),
    ] = None,
    overrides: Overrides = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import the targets and configs of the components; takes seconds.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the nodes of the Ray cluster that a run would join (RAY_ADDRESS).")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for each answer of a node with --cluster.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with --cluster.")] = False,
) -> None:
    """Check the installation: requirements and imports of plugins, with tracebacks, this machine, and open network ports.

    With --cluster, check every node of a Ray cluster instead: versions, plugins, the files that a config names, whether the run
    folder is shared, connections between the nodes with their speed, clocks, free CPUs and GPUs.

    Exit code: 1 if a plugin has a problem, or if a run on the cluster would fail.

    Example:
        rlcore doctor
        rlcore doctor hf --deep
        rlcore doctor --cluster config.yaml ++cluster.num_nodes=2 logger.log_dir=/shared/runs
    """
    if cluster:
        from rlcore_cli.cluster_check.command import check_cluster

        healthy = check_cluster(None if name is None else Path(name), overrides or [], timeout_s=timeout, as_json=as_json)
    elif overrides:
        raise UserError(f"Overrides ({', '.join(overrides)}) need --cluster and a config. Give one NAME to check plugins.")
    elif as_json:
        raise UserError("--json needs --cluster. To list plugins as JSON: rlcore list-plugins --json.")
    elif name is not None and is_path(name):
        healthy = _examine_target(Component.from_path(name))
    else:
        # Not strict, even if the environment asks for it: `doctor` must work when strict mode stops other commands.
        manager = discover(strict=False)
        results = {plugin: _examine(plugin, manager, deep=deep) for plugin in _chosen(manager, name)}
        healthy = all(results.values())
        for warning in plugin_warnings(manager):
            print(f"warning: {warning}")
        if name is None:
            _print_machine()
            _print_open_ports()
            print(f"\n{_summary(results)}")
    if not healthy:
        raise typer.Exit(1)


def _chosen(manager: PluginManager, name: str | None) -> list[Plugin]:
    if name is None:
        return list(manager.plugins)
    chosen = [
        plugin
        for plugin in manager.plugins
        if name in (plugin.name, plugin.distribution, *(r.component.name for r in plugin.registrations))
    ]
    if chosen:
        return chosen
    for known in Registry(manager).not_installed():
        if name in (known.name, known.distribution):
            raise UnknownComponentError(f"The {known.kind.label} {known.name!r} is not installed: {known.install}.")
    known_names = sorted({n for plugin in manager.plugins for n in (plugin.name, plugin.distribution)})
    raise UnknownComponentError(
        f"No plugin, distribution or component is named {name!r}.{did_you_mean(name, known_names)} "
        f"Plugins: {', '.join(plugin.name for plugin in manager.plugins)}."
    )


def _summary(results: Mapping[Plugin, bool]) -> str:
    """How many plugins are ready, and the names of those that are not and of components that lack a requirement."""
    ready = [plugin for plugin, healthy in results.items() if healthy and plugin.status is Status.READY]
    others = {
        "disabled": [plugin.name for plugin in results if plugin.status is Status.DISABLED],
        "with problems": [plugin.name for plugin, healthy in results.items() if not healthy],
    }
    needs = [r.component for plugin in ready for r in plugin.registrations if unmet_needs(r.component.needs) is not None]
    parts = [
        f"{counted(len(ready), 'plugin')} ready",
        *(f"{len(it)} {what}: {', '.join(it)}" for what, it in others.items() if it),
    ]
    if needs:
        names = ", ".join(component.name for component in needs)
        parts.append(f"{counted(len(needs), 'optional component')} unavailable: {names}")
    return "; ".join(parts)


def _examine(plugin: Plugin, manager: PluginManager, *, deep: bool) -> bool:
    print(f"{plugin.name}  {plugin.label}  {plugin.status.value}")
    print(f"  path    {plugin.location}")
    if plugin.status is Status.DISABLED:
        print(f"  {plugin.reason}\n")
        return True
    print("  needs")
    print_table(
        [
            ["    ok" if check.fits else "    UNMET", check.requirement, check.installed or "not installed"]
            for check in plugin.requirements
        ]
    )
    print(f"  import  {plugin.module}  {plugin.import_ms:.1f} ms")
    if plugin.heavy_modules:
        print(f"  HEAVY   its import loads {', '.join(plugin.heavy_modules)}, which slows down every command")
    for hook in plugin.hooks:
        print(f"  hook    {hook}")
    targets_healthy = [_examine_component(r.kind.value, r.component, deep=deep) for r in plugin.registrations]
    findings = list(plugin_findings(plugin, manager))
    for finding in findings:
        print(f"  {'ERROR' if finding.status == 'error' else 'NOTE'}   {finding.text}")
    if plugin.reason is not None:
        print(f"  {plugin.status.value.upper()}  {plugin.reason}")
    conflicts = list(_conflicts(plugin, manager))
    for text in conflicts:
        print(f"  CONFLICT  {text}")
    if not conflicts:
        _print_remedy(plugin)
    if plugin.error is not None:
        _print_traceback(plugin.error)
    print()
    has_errors = plugin.heavy_modules or any(finding.status == "error" for finding in findings)
    return plugin.status is Status.READY and not has_errors and all(targets_healthy)


def _examine_component(kind: str, component: Component, *, deep: bool) -> bool:
    print(f"  {kind} {component.name}  {component.target}")
    problem = unmet_needs(component.needs)
    if problem is not None:
        print(f"    unavailable: {problem}{f': {component.install}' if component.install else ''}")
    return _examine_target(component, kind) if deep else True


def _examine_target(component: Component, kind: str | None = None) -> bool:
    """Imports config and target, in this order, prints the import time or the traceback of each, and checks the contract."""
    from rl_train.assembly.contracts import kind_problem

    healthy = True
    loads: list[tuple[str | None, Callable[[], object]]] = [
        (component.config, partial(_load_config, component, kind)),
        (component.target, component.load),
    ]
    for reference, load in loads:
        if reference is None:
            continue
        started = time.perf_counter()
        try:
            load()
        except PluginError as error:
            healthy = False
            print(f"    FAILED  {reference}")
            _print_traceback(error.__cause__ or error)
        else:
            print(f"    ok      {reference}  {(time.perf_counter() - started) * 1000:.0f} ms")
    problem = kind_problem(component.load(), None if kind is None else Kind(kind)) if healthy else None
    if problem is not None:
        print(f"    FAILED  {problem}")
    return healthy and problem is None


def _load_config(component: Component, kind: str | None) -> object:
    """The config model; a kind with a section in configs requires its base class."""
    from rl_train.config.schema import BASES, section_of

    if kind is None or Kind(kind) not in BASES:
        return component.load_config()
    return section_of(component, Kind(kind))


def _conflicts(plugin: Plugin, manager: PluginManager) -> Iterator[str]:
    """Requirements of a plugin, and of what it requires, that no version can meet together with those of other plugins."""
    with_workers = {"rl-core", *(_name_of(check) for check in plugin.requirements if check.fits)}
    for owner, check in _all_checks(plugin.distribution, {canonicalize_name(other.distribution) for other in manager.plugins}):
        others = {
            other.distribution: f"{other.label} requires {theirs.requirement}"
            for other in manager.plugins
            for theirs in other.requirements
            if theirs.fits and _name_of(theirs) == _name_of(check) and not _have_a_common_version(check, theirs)
        }
        if check.fits or not others:
            continue
        shared = sorted(with_workers & others.keys())
        remedy = (
            "Install the library of the plugin in another environment, and name its interpreter in `policy.python` or "
            "`policy.generation.python`"
        )
        if shared:
            remedy = (
                f"Another environment does not help, because workers need {shared[0]} too. Use another release of the library, "
                "or install it with `pip install --no-deps` and test it"
            )
        yield (
            f"{owner} requires {check.requirement}, but {check.installed} is installed, because {', '.join(others.values())}. "
            f"{remedy}: docs/dependencies_that_conflict.md."
        )


def _name_of(check: RequirementCheck) -> str:
    return canonicalize_name(Requirement(check.requirement).name)


def _all_checks(distribution: str, seen: set[str]) -> Iterator[tuple[str, RequirementCheck]]:
    """The requirements of a distribution and of what it requires, but not of `seen`, each with who requires it."""
    found = importlib.metadata.distribution(distribution)
    with suppress(InvalidRequirement):  # of a plugin, it is reported as the reason
        for check in check_requirements(found):
            yield f"{distribution} {version_of(found)}", check
            if check.installed is not None and _name_of(check) not in seen:
                seen.add(_name_of(check))
                yield from _all_checks(_name_of(check), seen)


def _have_a_common_version(*checks: RequirementCheck) -> bool:
    """Whether a version fits all: one that they name, one component more, or 0."""
    specifiers = [Requirement(check.requirement).specifier for check in checks]
    named = {Version(each.version.removesuffix(".*")).base_version for specifier in specifiers for each in specifier}
    versions = ["0", *named, *(f"{each}.1" for each in named)]
    return any(all(specifier.contains(version, prereleases=True) for specifier in specifiers) for version in versions)


def _print_remedy(plugin: Plugin) -> None:
    unfit = [check for check in plugin.requirements if not check.fits]
    wanted = [f"'{check.requirement}'" for check in unfit if check.install is None]
    if wanted:
        print(f"  try     pip install {' '.join(wanted)}")
    for check in unfit:
        if check.install is not None:
            print(f"  try     {check.install}")


def _print_traceback(error: BaseException) -> None:
    # Skip the frames of the import machinery, which come first.
    own = error.__traceback__
    while own is not None and own.tb_next is not None and _is_importer(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    for line in "".join(traceback.format_exception(error.with_traceback(own))).splitlines():
        print(f"    {line}")


_PLUGINS_FOLDER = Path(rl_core.plugins.__file__).parent
_IMPORTLIB_FOLDER = Path(importlib.__file__).parent
_METADATA_FOLDER = Path(importlib.metadata.__file__).parent


def _is_importer(filename: str) -> bool:
    folder = Path(filename).parent
    return filename.startswith("<frozen importlib") or folder in (_PLUGINS_FOLDER, _IMPORTLIB_FOLDER, _METADATA_FOLDER)


def _print_open_ports() -> None:
    """Prints which ports of a run are reachable from other machines; see docs/security.md."""
    print("network")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        print(
            f"  open    RAY_ADDRESS={address}: ports of the run are reachable and Ray has no passwords; use a private network"
        )
    else:
        print("  ok      runs on this machine: Ray, gloo, NCCL and torch stores listen on the loopback interface only")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            interface = os.environ.get(variable)
            if interface is not None and not interface.startswith("lo"):
                print(f"  open    {variable}={interface}: unset it for runs on this machine")
    print("  open    the process group store of vLLM, one port per engine; block it with a firewall")


_SETS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX-BF16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "ARM BF16",
}
"""Flags of /proc/cpuinfo that matter to matrix products, and their names."""
_BFLOAT16: Final = ("avx512_bf16", "amx_bf16", "bf16")


def _print_machine() -> None:
    """Print threads, memory, instruction sets and whether sandboxes are available."""
    from rl_train.files import available_memory, format_size

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print("machine")
    print(f"  cpu     {platform.machine()}, {threads} threads, {format_size(available_memory())} of memory available")
    for line in instruction_lines(_cpu_flags()):
        print(f"  {line}")
    where = shutil.which("bwrap")
    if where is not None:
        print(f"  ok      bubblewrap, for programs that models write: {where}")
    else:
        print("  missing bubblewrap, for programs that models write: apt-get install bubblewrap, or dnf install bubblewrap")
    print()


def instruction_lines(flags: Sequence[str] | None) -> Iterable[str]:
    """What to print about instruction sets.

    Args:
        flags: of /proc/cpuinfo; None if the system does not have it.
    """
    if flags is None:
        return
    present = [name for flag, name in _SETS.items() if flag in flags]
    yield f"sets    {', '.join(present) or 'none of ' + ', '.join(_SETS.values())}"
    if not any(flag in flags for flag in _BFLOAT16):
        yield "note    no bfloat16 instructions: with `precision: bfloat16`, the hf policy multiplies in float32"


def _cpu_flags() -> Sequence[str] | None:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.split() for key, _, value in fields if key.strip() in ("flags", "Features")), None)
