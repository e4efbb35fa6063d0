"""Writes docs/cli.md from the commands themselves: `python docs/make_cli_reference.py`. It knows no command by name.

Commands of plugins are left out: they differ from one installation to the next.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rlcore_cli.main import COMMANDS, app

PAGE = Path(__file__).parent / "cli.md"

HEAD = """# The command

Made by `python docs/make_cli_reference.py`; a test holds it to the code.

Exit codes of every command: 0 done; 1 something broke, or a check found what it looks for; 2 a mistake in what was given; 130
interrupted. `rlcore train` also has 143 and 129 after SIGTERM and SIGHUP, and 124 at its time limit
([checkpoints](checkpoints.md#stopping-a-run)). A plugin may add commands of its own ([hooks](hooks.md)); `rlcore --help` lists
them with these.

| command | what it does |
|---|---|
"""


def cli_reference() -> str:
    """The page: a list of all commands, then each with its text, arguments, options and examples."""
    group: Any = typer.main.get_command(app)
    rows = [f"| [`{name}`](#rlcore-{name}) | {summary} |" for name, (_, summary) in COMMANDS.items()]
    sections = [_section(name, _context(group.commands[name], name)) for name in COMMANDS]
    return HEAD + "\n".join(rows) + "\n\n" + "\n\n".join(sections) + "\n"


def _context(command: Any, name: str) -> Any:
    """The context of the real command behind a lazy one."""
    return command.make_context(f"rlcore {name}", [], resilient_parsing=True)


def _section(name: str, context: Any) -> str:
    command = context.command
    text, _, example = inspect.cleandoc(command.help).replace("\b", "").partition("Example:\n")
    usage = " ".join(["rlcore", name, *command.collect_usage_pieces(context)])
    parts = [f"## `rlcore {name}`", text.strip(), f"```text\n{usage}\n```"]
    rows = list(_rows(command, context))
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if example:
        parts.append(f"```bash\n{textwrap.dedent(example).strip()}\n```")
    return "\n\n".join(parts)


def _rows(command: Any, context: Any) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            written, meaning = (part.replace("|", "\\|") for part in record)
            yield f"| `{written}` | {' '.join(meaning.split())} |"


if __name__ == "__main__":
    PAGE.write_text(cli_reference(), encoding="utf-8")
