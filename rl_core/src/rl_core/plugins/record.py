"""Records of plugins and their components."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NotRequired, TypedDict

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


class Origin(TypedDict):
    """Where a plugin comes from; fields of `Plugin`."""

    distribution: str
    version: str
    module: NotRequired[str]
    location: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One plugin, its status and its components.

    Attributes:
        name: The name of its entry point.
        module: The module of the entry point.
        distribution: The name of its distribution.
        version: The version of the distribution.
        location: The folder of the distribution's metadata.
        status: Its status.
        reason: Why it is not ready, in one line; None if it is.
        requirements: Each requirement of the distribution and whether it is met.
        components: Its components, each with its kind.
        known: Components of other distributions that it lists, for errors about those that are not installed.
        hooks: The names of the implemented hooks.
        import_ms: Wall-clock milliseconds of importing its module; None if it was not imported.
        heavy_modules: Imported libraries that registration must not import.
        error: The exception raised by the import or a hook.
    """

    name: str
    distribution: str
    version: str
    module: str = ""
    location: str = ""
    status: Status
    reason: str | None = None
    requirements: tuple[RequirementCheck, ...] = ()
    components: tuple[tuple[Kind, Component], ...] = ()
    known: tuple[KnownComponent, ...] = ()
    hooks: tuple[str, ...] = ()
    import_ms: float | None = None
    heavy_modules: tuple[str, ...] = ()
    error: BaseException | None = None

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
