"""Records of plugins and their components."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rl_core.plugins.component import Component, Kind, KnownComponent
from rl_core.plugins.requirements import RequirementCheck


class Status(StrEnum):
    """Status of a plugin."""

    READY = "ready"
    """Its requirements are installed, and its module and hooks work."""
    MISSING = "missing"
    """A requirement of its distribution is not installed, or not in an allowed version."""
    FAILED = "failed"
    """Its module, its hooks or its metadata are broken."""
    DISABLED = "disabled"
    """It is disabled by `RLCORE_DISABLE_PLUGINS`."""


@dataclass(kw_only=True, eq=False)
class Plugin:
    """One plugin and its components; `rl_core.plugins.loading` fills in what loading it shows.

    Attributes:
        name: The name of its entry point.
        module: The module of the entry point.
        distribution: The name of its distribution.
        version: The version of the distribution.
        location: The folder of the distribution's metadata.
        is_disabled: Whether `RLCORE_DISABLE_PLUGINS` names it, so that it was not loaded.
        requirements: Each requirement of the distribution and whether it is met.
        faults: What is broken in its module, its hooks or its metadata, one clause each.
        components: Its components, each with its kind.
        known: Components of other distributions that it lists, for errors about those that are not installed.
        hooks: The names of the implemented hooks.
        import_ms: Wall-clock milliseconds of importing its module; None if it was not imported.
        heavy_modules: Imported libraries that registration must not import.
        printed: What its module or its component hooks wrote to the standard output, which is not shown.
        error: The first exception raised by the import or a hook.
    """

    name: str
    distribution: str
    version: str
    module: str = ""
    location: str = ""
    is_disabled: bool = False
    requirements: tuple[RequirementCheck, ...] = ()
    faults: list[str] = field(default_factory=list)
    components: list[tuple[Kind, Component]] = field(default_factory=list)
    known: list[KnownComponent] = field(default_factory=list)
    hooks: tuple[str, ...] = ()
    import_ms: float | None = None
    heavy_modules: tuple[str, ...] = ()
    printed: str = ""
    error: BaseException | None = None

    @property
    def status(self) -> Status:
        """Its status. A missing requirement is the cause of a failed import, so it determines the status."""
        if self.is_disabled:
            return Status.DISABLED
        if any(not check.fits for check in self.requirements):
            return Status.MISSING
        return Status.FAILED if self.faults else Status.READY

    @property
    def reason(self) -> str | None:
        """Why it is not ready, in one line; None if it is."""
        if self.is_disabled:
            return "disabled by RLCORE_DISABLE_PLUGINS"
        missing = [check.problem for check in self.requirements if check.problem is not None]
        return "; ".join([*missing, *self.faults]) or None

    @property
    def label(self) -> str:
        """The distribution and its version: 'acme-rl 2.1'."""
        return f"{self.distribution} {self.version}"

    @property
    def registrations(self) -> list[Registration]:
        """Its components, each with its kind and this plugin."""
        return [Registration(kind=kind, component=component, plugin=self) for kind, component in self.components]


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A component as registered by one plugin."""

    kind: Kind
    component: Component
    plugin: Plugin
