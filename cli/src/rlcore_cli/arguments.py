"""The arguments that several commands share, each worded once; it reads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="key=value to change a key of the file, ++key=value to add one.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
