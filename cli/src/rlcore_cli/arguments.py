"""Arguments that several commands share, how they are read, and nouns with their number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_core.errors import UserError

Config = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)]
Bases = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Base config that CONFIG extends, such as the packaged grpo.yaml or sft.yaml. May be repeated; without CONFIG, "
        "the last one is the config.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="key=value overrides a key of the file; ++key=value adds one.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Tokenizer instead of the model's: a name, a folder or `module:name`.", show_default=False
    ),
]
DATA_FILES = (".jsonl", ".parquet", ".csv", ".tsv")
"""Endings of files with rows, which are not configs."""


def config_files(
    config: Path | None, bases: list[Path] | None, overrides: list[str] | None, *, must_exist: bool = True
) -> tuple[list[Path], list[str]]:
    """The config files in the order in which they are applied, and the overrides.

    Raises:
        typer.BadParameter: There is no config file.
        InvalidConfigError: One of them does not exist.
    """
    from rl_train.config.sources import refuse_missing

    files, given = list(bases or []), list(overrides or [])
    if config is not None and files and "=" in str(config) and not config.exists():
        given.insert(0, str(config))
    elif config is not None:
        files.append(config)
    if not files:
        raise typer.BadParameter("give a YAML file, or --config FILE.", param_hint="CONFIG")
    for file in files:
        if file.suffix in DATA_FILES:
            raise UserError(f"{file} is a data file: `rlcore init {file} --model MODEL` writes a config for it.")
        if file.suffix == ".py":
            raise UserError(f"{file} is Python code, but a config is a YAML file (examples/grpo_addition.yaml is one).")
    if must_exist:
        refuse_missing(files)
    return files, given


def integers(text: str | None, option: str, example: str) -> list[int] | None:
    """The numbers of an option such as `1,4,8`; None if it is not given.

    Raises:
        UserError: It is not a list of integers.
    """
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text} is not a list of integers. Separate them with commas: {option} {example}.") from None


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as `1 row`, `2 rows`, `0 policies`."""
    return f"{number} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
