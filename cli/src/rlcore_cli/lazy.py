"""Command groups that import a command only when it runs, so that no command slows down the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry


class LightCommand(TyperCommand):
    """A command that parses its flags without pydantic, whose import takes as long as all others together."""

    def get_help_option(self, ctx: Any) -> Any:
        """The `--help` option, with a default: without one, Typer imports pydantic to convert it."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line, with required arguments written without Typer's braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class LazyCommand(TyperCommand):
    """A command that consists of a name and a help line until it runs.

    Args:
        name: The command's name.
        load: Imports and returns its function, or its `typer.Typer` application.
        summary: Its line in the list of commands.
        hidden: Leave it out of the list of commands.
        leading: Arguments that come before those of the user.
    """

    def __init__(
        self, name: str, load: Callable[[], Any], *, summary: str, hidden: bool = False, leading: Sequence[str] = ()
    ) -> None:
        super().__init__(name, help=summary, short_help=summary, hidden=hidden, rich_markup_mode=None)
        self._load = load
        self._leading = tuple(leading)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """The context of the real command, which is imported here, when it is first needed."""
        return _build_command(str(self.name), self._load()).make_context(
            info_name, [*self._leading, *args], parent=parent, **extra
        )


class LazyGroup(TyperGroup):
    """A group of lazy commands.

    Subclasses set `builtin` and `aliases`: import path and help line by command name. Aliases are not listed, and may have
    further arguments, which come before those of the user.
    """

    builtin: ClassVar[Mapping[str, tuple[str, str]]] = {}
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, **settings: Any) -> None:
        settings["help"] = with_literal_examples(settings.get("help") or "")
        super().__init__(**settings)
        for name, (target, summary, *leading) in (*self.builtin.items(), *self.aliases.items()):
            hidden = name in self.aliases
            self.add_command(LazyCommand(name, _importer(target), summary=summary, hidden=hidden, leading=leading))

    def get_help_option(self, ctx: Any) -> Any:
        """As `LightCommand.get_help_option`."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def lazy_app(commands: Mapping[str, tuple[str, str]]) -> typer.Typer:
    """An application of lazy commands: import path and help line by command name."""
    return typer_app(type("Commands", (LazyGroup,), {"builtin": commands}))


def typer_app(group: type[LazyGroup]) -> typer.Typer:
    """An application without completion and rich text, which prints its help if no command is given."""
    return typer.Typer(
        cls=group, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True
    )


class PluginGroup(LazyGroup):
    """A lazy group that also has the commands of plugins.

    Plugins are discovered only for `--help` and for a name that is not built in.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own = frozenset(self.commands)
        self._registry: Registry | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands: the built-in ones, then those of plugins."""
        for registration in self._registry_with_commands().manager.registrations:
            if registration.kind == "command" and registration.component.name in self._own:
                print(
                    f"warning: {registration.plugin.label} registers a command {registration.component.name!r}; "
                    "the built-in command is used",
                    file=sys.stderr,
                )
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None; Typer then prints an error with a suggestion.

        Raises:
            PluginError: The command belongs to a plugin that is broken, disabled, or known but not installed.
        """
        from rl_core.errors import UnknownComponentError, WrongKindError
        from rl_core.plugins.component import is_path

        # `rlcore config.yaml` is a forgotten `train`, not the import path of a class.
        if cmd_name not in self.commands and not cmd_name.startswith("-") and not is_path(cmd_name):
            try:
                self._registry_with_commands().find("command", cmd_name)
            except (UnknownComponentError, WrongKindError):
                return None
        return super().get_command(ctx, cmd_name)

    def _registry_with_commands(self) -> Registry:
        from rl_core.plugins.manager import discover
        from rl_core.plugins.registry import Registry

        if self._registry is None:
            self._registry = Registry(discover())
            for component in self._registry.all("command"):
                if component.name not in self._own:
                    load = _finder(self._registry, component.name)
                    self.add_command(LazyCommand(component.name, load, summary=component.summary))
        return self._registry


def with_literal_examples(text: str) -> str:
    """Help text that keeps its line breaks from `Example:` on; Typer would join the lines into a paragraph."""
    return text.replace("\b\nExample:\n", "Example:\n").replace("\nExample:\n", "\n\b\nExample:\n")


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
