"""Command groups that import a command only when it runs, so that no command slows down the others."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry

HELP_WIDTH = 120
"""Longest line of help; narrower terminals have shorter ones."""
COMPLETING = "_RLCORE_COMPLETE"
"""The variable in which the shell says that it asks for completions."""


class LightCommand(TyperCommand):
    """A command that parses its flags without pydantic, whose import takes as long as all others together."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`."""
        return _with_default(super().get_help_option(ctx))

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
    further arguments, which come before those of the user. `sections` are the headings of the help and the commands below each;
    other commands follow under "Commands", or "Commands of plugins" if there are sections.
    """

    builtin: ClassVar[Mapping[str, tuple[str, str]]] = {}
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, **settings: Any) -> None:
        settings["help"] = with_literal_examples(settings.get("help") or "")
        super().__init__(**settings)
        for name, (target, summary, *leading) in (*self.builtin.items(), *self.aliases.items()):
            hidden = name in self.aliases
            self.add_command(LazyCommand(name, _importer(target), summary=summary, hidden=hidden, leading=leading))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the help lines of the commands, by section."""
        listed = {name: command for name in self.list_commands(ctx) if not (command := self.commands[name]).hidden}
        width = max(map(len, listed), default=0)
        named = {name for names in self.sections.values() for name in names}
        others = tuple(name for name in listed if name not in named)
        for title, names in (*self.sections.items(), ("Commands of plugins" if self.sections else "Commands", others)):
            if rows := [(name.ljust(width), listed[name].get_short_help_str(limit=200)) for name in names if name in listed]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`."""
        return _with_default(super().get_help_option(ctx))


def lazy_app(commands: Mapping[str, tuple[str, str]]) -> typer.Typer:
    """An application of lazy commands: import path and help line by command name."""
    return typer_app(type("Commands", (LazyGroup,), {"builtin": commands}))


def typer_app(group: type[LazyGroup]) -> typer.Typer:
    """An application without rich text, which prints its help if no command is given.

    It completes command lines if the shell asks for it. The options of Typer that install completion are left out: their import
    is slow, and `docs/cli.md` shows the line that turns it on.
    """
    return typer.Typer(
        cls=group,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=COMPLETING in os.environ,
        no_args_is_help=True,
        context_settings={"max_content_width": HELP_WIDTH},
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


def _with_default(option: Any) -> Any:
    """A flag with a default: without one, Typer imports pydantic to convert it."""
    if option is not None:
        option.default = False
    return option


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
