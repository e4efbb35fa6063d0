"""Accepts every option, so that a misspelt one has no effect."""

from typing import Annotated

import typer

command = typer.Typer()


@command.command(context_settings={"ignore_unknown_options": True})
def lines(words: Annotated[list[str] | None, typer.Argument(help="Words.")] = None) -> None:
    """Print the number of words.

    Example:
        rlcore lines a b
    """
    print(len(words or ()))
