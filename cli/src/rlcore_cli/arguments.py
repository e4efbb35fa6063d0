"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="key=value overrides a key of the file; ++key=value adds one.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
