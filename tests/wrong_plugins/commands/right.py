"""The right control: prints the number of lines of a file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rl_core.errors import UserError

File = Annotated[Path, typer.Argument(help="File to read.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file.

    Example:
        rlcore right notes.txt
    """
    if not file.is_file():
        raise UserError(f"{file} does not exist: name a file.")
    lines = len(file.read_text().splitlines())
    print(json.dumps({"lines": lines}) if as_json else f"{lines} lines")
