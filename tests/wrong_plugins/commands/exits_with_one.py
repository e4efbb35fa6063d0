"""A file that does not exist ends it with exit code 1, as if it had failed itself."""

import json
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="File to read.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file.

    Example:
        rlcore exits_with_one notes.txt
    """
    if not file.is_file():
        print(f"{file} does not exist.")
        raise typer.Exit(1)
    lines = len(file.read_text().splitlines())
    print(json.dumps({"lines": lines}) if as_json else f"{lines} lines")
