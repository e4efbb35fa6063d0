"""Prints a line for people before the JSON for programs."""

from wrong_plugins.commands.right import AsJson, File
from wrong_plugins.commands.right import command as right


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file.

    Example:
        rlcore lines notes.txt
    """
    print(f"reading {file}")
    right(file, as_json)
