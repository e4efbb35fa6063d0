"""Finds the files that a config refers to: relative to the working directory, else to the file that contains the path."""

from __future__ import annotations

import os

from rl_core.config.source_tree import SourceLocation


def locate(text: str, *, location: SourceLocation | None) -> str | None:
    """The absolute path that a text refers to, or None if it does not exist.

    Args:
        text: The path as it was written; `~` is the home folder.
        location: The location of the value; the folder of that file is searched after the working directory.
    """
    written = os.path.expanduser(text)
    for folder in folders(location):
        candidate = os.path.normpath(os.path.join(folder, written))
        if _exists(candidate):
            return candidate
    return None


def folders(location: SourceLocation | None) -> list[str]:
    """The folders searched for relative paths, in order: the working directory and the folder of the file."""
    here = os.getcwd()
    if location is None or location.file is None:
        return [here]
    beside = os.path.dirname(os.path.abspath(location.file))
    return [here] if beside == here else [here, beside]


def looks_like_path(text: str) -> bool:
    """Whether a text can only be a path: `./model`, `~/model`, `/model`, `model.gguf`."""
    return text.startswith(("./", "../", "~", "/")) or text.endswith((".gguf", ".jinja", ".jsonl", ".safetensors"))


def leads_into_folder(text: str, *, location: SourceLocation | None) -> bool:
    """Whether a text is a path in a folder that exists, and so no name on the hub."""
    parent = os.path.dirname(text)
    return bool(parent) and any(_exists(os.path.join(folder, parent)) for folder in folders(location))


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):  # a template with line breaks or a NUL is not a file name
        return False
