"""Commands that are imported when they are run, so that each costs the others nothing; it knows none of them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(TyperCommand):
    """A command that is a name and a line of help until it is run.

    Args:
        name: The command's name.
        load: Imports and returns its function, or its `typer.Typer` application.
        summary: The line that the list of commands shows.
    """

    def __init__(self, name: str, load: Callable[[], Any], *, summary: str) -> None:
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)
        self._load = load

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """The context of the real command, imported here: this is the first moment at which it is needed."""
        return _build_command(str(self.name), self._load()).make_context(info_name, args, parent=parent, **extra)


class LazyGroup(TyperGroup):
    """A group of lazy commands: its own, and those that plugins register.

    The plugins are asked only for `--help` and for a name that is not the group's own.
    """

    builtin: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **settings: Any) -> None:
        settings["help"] = with_literal_examples(settings.get("help") or "")
        super().__init__(**settings)
        self._plugins_asked = False
        for name, (target, summary) in self.builtin.items():
            self.add_command(LazyCommand(name, _importer(target), summary=summary))

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands: the group's own, then those of plugins."""
        self._ask_plugins()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            self._ask_plugins(wanted=cmd_name)
        return super().get_command(ctx, cmd_name)

    def _ask_plugins(self, wanted: str | None = None) -> None:
        from rl_core.errors import UnknownComponentError, WrongKindError
        from rl_core.plugins import Kind
        from rl_core.plugins.manager import discover
        from rl_core.plugins.registry import Registry

        if self._plugins_asked:
            return
        self._plugins_asked = True
        registry = Registry(discover())
        for registration in registry.manager.registrations:
            name = registration.component.name
            if registration.kind is not Kind.COMMAND:
                continue
            if name in self.builtin:
                print(
                    f"warning: {registration.plugin.label} registers a command {name!r}; rlcore's own is used",
                    file=sys.stderr,
                )
            else:
                self.add_command(LazyCommand(name, _finder(registry, name), summary=registration.component.summary))
        if wanted is not None and wanted not in self.commands:
            try:
                registry.find(Kind.COMMAND, wanted)
            except (UnknownComponentError, WrongKindError):
                # Typer's own words for an unknown command follow, with a suggestion from all that are known by now.
                return


def with_literal_examples(text: str) -> str:
    """Help text in which everything from `Example:` on keeps its lines; click would join them into a paragraph."""
    return text.replace("\nExample:\n", "\n\b\nExample:\n")


def _build_command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
    else:
        alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        alone.command(name)(target)
        command = typer.main.get_command(alone)
    command.help = with_literal_examples(command.help or "")
    return command


def _importer(target: str) -> Callable[[], Any]:
    module, _, attribute = target.partition(":")
    return lambda: getattr(importlib.import_module(module), attribute)


def _finder(registry: Any, name: str) -> Callable[[], Any]:
    return lambda: registry.find("command", name).load()
