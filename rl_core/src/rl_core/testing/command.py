"""Conformance of commands: functions with Typer annotations, or `typer.Typer` applications."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rl_core.errors import RLCoreError
from rl_core.plugins.component import Kind
from rl_core.testing.packaging import check_import
from rl_core.testing.promises import Condition, Conformance, Found, promise

_PARSES = "test_its_help_describes_every_argument"


def _leaves(app: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands of an application with their names, or the command itself without one."""
    from typer.main import get_command

    command = app if names else get_command(app)
    for name, each in getattr(command, "commands", {}).items():
        yield from _leaves(each, (*names, name))
    if not hasattr(command, "commands"):
        yield names, command


def _prints_json(tests: type[Any]) -> bool:
    return bool(tests.arguments) and any("--json" in each.opts for _, leaf in _leaves(tests.create()) for each in leaf.params)


_RUNS = Condition(text="`arguments` is not set", holds=lambda tests: bool(tests.arguments))
_JSON = Condition(text="`arguments` is not set, or it has no `--json`", holds=_prints_json)


class CommandConformance(Conformance[Any]):
    """Promises of commands.

    Attributes:
        arguments: arguments with which the command succeeds.
    """

    kind = Kind.COMMAND
    minimum = 5
    arguments: ClassVar[Sequence[str]] = ()

    @classmethod
    def create(cls) -> Any:
        from typer import Typer

        target, app = cls.registered().load(), Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(target, Typer):
            return target
        app.command()(target)
        return app

    @promise("Its help has a description, an `Example:`, and a text for every argument and option.")
    def test_its_help_describes_every_argument(self) -> None:
        for names, leaf in _leaves(self.subject()):
            command, code, text = " ".join((self.component, *names)), *self._run(*names, "--help")
            if code or "Example:" not in text or not (leaf.help or "").partition("Example:")[0].strip():
                raise Found(f"the help of `{command}` needs a description and an `Example:`: its docstring. It is {text!r}.")
            if silent := [each.name for each in leaf.params if not getattr(each, "help", None)]:
                raise Found(f"`{command}` has arguments without a help text: {', '.join(silent)}.")

    @promise("Importing it prints nothing and imports none of the heavy libraries, so that its help is fast.")
    def test_its_import_is_silent_and_light(self) -> None:
        check_import([self.registered().target.partition(":")[0]])

    @promise("An unknown option is a usage error, with exit code 2.", after=_PARSES)
    def test_an_unknown_option_is_refused(self) -> None:
        for names, _ in _leaves(self.subject()):
            if (code := self._run(*names, "--no-such-option")[0]) != 2:
                raise Found(f"`{' '.join((self.component, *names))} --no-such-option` has the exit code {code}.")

    @promise(
        "A wrong value of a required argument is a user error: exit code 2, and a text without a traceback.", after=_PARSES
    )
    def test_a_wrong_argument_is_a_user_error(self) -> None:
        for names, leaf in _leaves(self.subject()):
            wrong = [f"{self._folder}/no-such-{each.name}" for each in leaf.params if each.required]
            if wrong and (found := self._run(*names, *wrong))[0] != 2:
                raise Found(f"`{' '.join((self.component, *names, *wrong))}` has the exit code {found[0]}: {found[1]}")

    @promise("It succeeds with `arguments`.", applies=_RUNS, after=_PARSES)
    def test_it_succeeds(self) -> str:
        code, text = self._run(*self.arguments)
        if code:
            raise Found(f"the exit code is {code}: {text}")
        return text[:80]

    @promise("With `--json` it prints JSON and nothing else.", applies=_JSON, after="test_it_succeeds")
    def test_json_is_json(self) -> None:
        json.loads(self._run(*self.arguments, "--json")[1])

    def _run(self, *words: str) -> tuple[int, str]:
        """Exit code and output, as of `rlcore`."""
        from typer.testing import CliRunner

        done = CliRunner().invoke(self.subject(), words)
        error = done.exception
        if isinstance(error, RLCoreError):
            return error.exit_code, f"error: {error}"
        if error is not None and not isinstance(error, SystemExit):
            raise error
        return done.exit_code, done.output
