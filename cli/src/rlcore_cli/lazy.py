"""Commands that are imported when they are run, so that each costs the others nothing; it knows none of them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry


class LightCommand(TyperCommand):
    """A command whose flags are read without pydantic, which takes as long to import as everything else together."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`; Typer coerces its missing default through pydantic, so it is given one."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; what must be given stands bare, not in Typer's braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


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
        self._registry: Registry | None = None
        for name, (target, summary) in self.builtin.items():
            self.add_command(LazyCommand(name, _importer(target), summary=summary))

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands: the group's own, then those of plugins."""
        for registration in self._registry_with_commands().manager.registrations:
            if registration.kind == "command" and registration.component.name in self.builtin:
                print(
                    f"warning: {registration.plugin.label} registers a command {registration.component.name!r}; "
                    "rlcore's own is used",
                    file=sys.stderr,
                )
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None, for which Typer has its own words and a suggestion.

        Raises:
            PluginError: A plugin that is broken, disabled, or known and not installed would bring it.
        """
        from rl_core.errors import UnknownComponentError, WrongKindError
        from rl_core.plugins.component import is_path

        # `rlcore config.yaml` is a forgotten `train`, not the path of a class.
        if cmd_name not in self.commands and not cmd_name.startswith("-") and not is_path(cmd_name):
            try:
                self._registry_with_commands().find("command", cmd_name)
            except (UnknownComponentError, WrongKindError):
                return None
        return super().get_command(ctx, cmd_name)

    def get_help_option(self, ctx: Any) -> Any:
        """As `LightCommand.get_help_option`."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def _registry_with_commands(self) -> Registry:
        from rl_core.plugins.manager import discover
        from rl_core.plugins.registry import Registry

        if self._registry is None:
            self._registry = Registry(discover())
            for component in self._registry.all("command"):
                if component.name not in self.builtin:
                    load = _finder(self._registry, component.name)
                    self.add_command(LazyCommand(component.name, load, summary=component.summary))
        return self._registry


def with_literal_examples(text: str) -> str:
    """Help text in which everything from `Example:` on keeps its lines; Typer would join them into a paragraph."""
    return text.replace("\nExample:\n", "\n\b\nExample:\n")


def _build_command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
    else:
        alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        alone.command(name, cls=LightCommand)(target)
        command = typer.main.get_command(alone)
    command.help = with_literal_examples(command.help or "")
    return command


def _importer(target: str) -> Callable[[], Any]:
    module, _, attribute = target.partition(":")
    return lambda: getattr(importlib.import_module(module), attribute)


def _finder(registry: Registry, name: str) -> Callable[[], Any]:
    return lambda: registry.find("command", name).load()
