"""Its help does not show how to call it."""

from wrong_plugins.commands.right import AsJson, File
from wrong_plugins.commands.right import command as right


def command(file: File, as_json: AsJson = False) -> None:
    """Print the number of lines of a file."""
    right(file, as_json)
