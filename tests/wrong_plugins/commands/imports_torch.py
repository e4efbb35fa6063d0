"""Imports a heavy library when its help is shown."""

import torch
from wrong_plugins.commands.right import AsJson, File
from wrong_plugins.commands.right import command as right


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file.

    Example:
        rlcore lines notes.txt
    """
    assert torch.__version__
    right(file, as_json)
