"""Lets the exception of a missing file reach the user."""

from wrong_plugins.commands.right import AsJson, File
from wrong_plugins.commands.right import command as right


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file.

    Example:
        rlcore lines notes.txt
    """
    file.read_text()
    right(file, as_json)
