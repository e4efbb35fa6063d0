"""Finds components by kind and name, with a specific error for each failure; never imports the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packaging.utils import canonicalize_name

from rl_core.errors import (
    BrokenPluginError,
    ComponentImportError,
    ComponentNotInstalledError,
    DuplicateComponentError,
    MissingCapabilityError,
    PluginError,
    UnknownComponentError,
    WrongKindError,
)
from rl_core.plugins.component import Component, Kind, KnownComponent, Plugin, Registration, Status, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_core.plugins.manager import DISABLE_VARIABLE, PluginManager


class Registry:
    """The components of a plugin manager, by kind and name."""

    def __init__(self, manager: PluginManager) -> None:
        self.manager = manager

    def find(self, kind: str, name: str, *, requires: Iterable[str] = ()) -> Component:
        """The one working component of this kind and name.

        Args:
            kind: A value of `Kind`: 'policy', 'generation', 'environment', ...
            name: A registered name, or the path of a class, "package.module.Class" or "package.module:Class".
            requires: Capabilities that it must have. For a path they are read from the attribute `capabilities` of the
                class, which imports it.

        Raises:
            UnknownComponentError: No plugin registers the name.
            ComponentNotInstalledError: The distribution that registers it is not installed.
            BrokenPluginError: The plugin that registers it does not work, or is disabled.
            DuplicateComponentError: Several plugins register it.
            WrongKindError: It is registered as another kind only.
            MissingCapabilityError: It lacks a required capability.
            ComponentImportError: It is a path, and there is no such package, module or class.
        """
        wanted = Kind(kind)
        needs = tuple(map(str, requires))
        if is_path(name):
            return _component_at(name, kind=wanted, needs=needs)
        same_name = [r for r in self.manager.registrations if r.component.name == name]
        matches = [r for r in same_name if r.kind is wanted]
        if not matches:
            raise self._not_found(wanted, name, elsewhere=same_name)
        if len(matches) > 1:
            raise name_collision(wanted, name, matches)
        registration = matches[0]
        if registration.plugin.status is not Status.READY:
            raise _broken(wanted, name, registration.plugin)
        absent = [need for need in needs if need not in registration.component.capabilities]
        if absent:
            raise self._incapable(registration, absent=absent, needs=needs)
        return registration.component

    def names(self, kind: str) -> list[str]:
        """The names of this kind that working plugins register, sorted."""
        return sorted({r.component.name for r in self._ready(Kind(kind))})

    def all(self, kind: str) -> list[Component]:
        """The components of this kind that working plugins register, sorted by name."""
        return sorted((r.component for r in self._ready(Kind(kind))), key=lambda component: component.name)

    def known(self) -> list[KnownComponent]:
        """The components that `rlcore_known_components` of any plugin names, installed or not."""
        return [component for plugin in self.manager.plugins for component in plugin.known]

    def not_installed(self) -> list[KnownComponent]:
        """Known components that no plugin registers and whose distribution is not installed."""
        present = {(r.kind, r.component.name) for r in self.manager.registrations}
        installed = {canonicalize_name(plugin.distribution) for plugin in self.manager.plugins}
        return [
            component
            for component in self.known()
            if (component.kind, component.name) not in present and canonicalize_name(component.distribution) not in installed
        ]

    def _ready(self, kind: Kind) -> list[Registration]:
        return [r for r in self.manager.registrations if r.kind is kind and r.plugin.status is Status.READY]

    def _not_found(self, kind: Kind, name: str, *, elsewhere: list[Registration]) -> PluginError:
        known = next((c for c in self.known() if (c.kind, c.name) == (kind, name)), None)
        for plugin in self.manager.plugins:
            is_its_own = plugin.name == name or (
                known is not None and canonicalize_name(plugin.distribution) == canonicalize_name(known.distribution)
            )
            if plugin.status is not Status.READY and is_its_own:
                return _broken(kind, name, plugin)
        if known is not None:
            return ComponentNotInstalledError(f"{kind.label.capitalize()} {name!r} is not installed: {known.install}.")
        if elsewhere:
            return self._other_kind(kind, name, elsewhere)
        return self._unknown(kind, name)

    def _other_kind(self, kind: Kind, name: str, elsewhere: list[Registration]) -> WrongKindError:
        kinds = " and ".join(f"{_article(r.kind.label)} {r.kind.label} ({r.plugin.label})" for r in elsewhere)
        return WrongKindError(f"{name!r} is {kinds}, not {_article(kind.label)} {kind.label}. {self._installed(kind)}")

    def _unknown(self, kind: Kind, name: str) -> UnknownComponentError:
        absent = {component.name: component for component in self.not_installed() if component.kind is kind}
        hint = did_you_mean(name, [*self.names(kind), *absent])
        for other, component in absent.items():
            if repr(other) in hint:
                hint += f" It is not installed: {component.install}."
        broken = [f"{plugin.name} ({plugin.label})" for plugin in self.manager.broken if not plugin.components]
        suspects = f" Plugins that failed to load: {', '.join(broken)}." if broken else ""
        return UnknownComponentError(f"No {kind.label} named {name!r}. {self._installed(kind)}{hint}{suspects}")

    def _incapable(self, registration: Registration, *, absent: list[str], needs: tuple[str, ...]) -> PluginError:
        component, label = registration.component, registration.kind.label
        capable = [other.name for other in self.all(registration.kind) if set(needs) <= set(other.capabilities)]
        has = f"Its capabilities: {', '.join(component.capabilities)}." if component.capabilities else "It declares none."
        them = "it" if len(needs) == 1 else "them"
        others = f"{label.capitalize()}s with {them}: {', '.join(capable)}." if capable else f"No installed {label} has {them}."
        who = f"{registration.kind.label.capitalize()} {component.name!r} ({registration.plugin.label})"
        return _lacking(who, absent, f". {has} {others}")

    def _installed(self, kind: Kind) -> str:
        names = self.names(kind)
        return f"Installed: {', '.join(names)}." if names else f"No {kind.label} is installed."


def _component_at(path: str, *, kind: Kind, needs: tuple[str, ...]) -> Component:
    component = Component.from_path(path)
    # Its source is read and not imported: the module may need torch.
    if (problem := missing_target(path)) is not None:
        raise ComponentImportError(f"{kind.label.capitalize()} {path!r} cannot be imported: {problem}")
    if needs:
        able = getattr(component.load(), "capabilities", ())
        absent = [need for need in needs if need not in able]
        if absent:
            missing = "it" if len(absent) == 1 else "them"
            who = f"{kind.label.capitalize()} {path!r}"
            raise _lacking(who, absent, f": its class attribute `capabilities` does not name {missing}.")
    return component


def _lacking(who: str, absent: list[str], more: str) -> MissingCapabilityError:
    noun = "capability" if len(absent) == 1 else "capabilities"
    return MissingCapabilityError(f"{who} lacks the {noun} {', '.join(map(repr, absent))}{more}")


def _broken(kind: Kind, name: str, plugin: Plugin) -> BrokenPluginError:
    if plugin.status is Status.DISABLED:
        return BrokenPluginError(
            f"{kind.label.capitalize()} {name!r}: the plugin {plugin.name!r} ({plugin.label}) is disabled by "
            f"{DISABLE_VARIABLE}. Take it out of that list."
        )
    failed = "cannot be used" if plugin.status is Status.MISSING else "failed to load"
    return BrokenPluginError(
        f"{kind.label.capitalize()} {name!r} comes from {plugin.label}, which {failed}: {plugin.reason}. "
        f"Run: rlcore doctor {plugin.name}"
    )


def name_collision(kind: Kind, name: str, matches: Sequence[Registration]) -> DuplicateComponentError:
    """The error for a component that several plugins register, with the plugins and how to disable one."""
    plugins = [match.plugin for match in matches]
    labels = " and ".join(plugin.label for plugin in plugins)
    choices = " or ".join(f"{DISABLE_VARIABLE}={plugin.name}" for plugin in plugins if plugin.name != name)
    choices = choices or " or ".join(f"{DISABLE_VARIABLE}={plugin.distribution}" for plugin in plugins)
    return DuplicateComponentError(
        f"{len(plugins)} plugins register the {kind.label} {name!r}: {labels}. Disable one: {choices}"
    )


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"
