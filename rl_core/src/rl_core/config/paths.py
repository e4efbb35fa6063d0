"""The rule for relative paths: relative to the working directory, else to the file that contains them.

The rule applies to fields annotated as `Annotated[str, INPUT_PATH]` or `Annotated[str, NAME_OR_PATH]`. Outputs of a run (the
run folder, checkpoints) are not marked, and are relative to the working directory. Independent of the sections.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rl_core.config.source_tree import SourceLocation


@dataclass(frozen=True)
class PathRule:
    """Marks a field that may contain a path.

    Attributes:
        must_exist: Whether a path that does not exist is an error; otherwise it is unchanged, as the name of something.
    """

    must_exist: bool


INPUT_PATH = PathRule(must_exist=True)
"""A file or folder that the run reads."""
NAME_OR_PATH = PathRule(must_exist=False)
"""The name of something (a model of a hub, a packaged template), or the path of a file or folder."""


def locate(text: str, *, place: SourceLocation | None) -> str | None:
    """The absolute path that a text refers to, or None if it does not exist.

    Args:
        text: The path as it was written; `~` is the home folder.
        place: The location of the value; the folder of that file is searched after the working directory.
    """
    written = os.path.expanduser(text)
    for folder in folders(place):
        candidate = os.path.normpath(os.path.join(folder, written))
        if _exists(candidate):
            return candidate
    return None


def folders(place: SourceLocation | None) -> list[str]:
    """The folders searched for relative paths, in order: the working directory and the folder of the file."""
    here = os.getcwd()
    if place is None or place.file is None:
        return [here]
    beside = os.path.dirname(os.path.abspath(place.file))
    return [here] if beside == here else [here, beside]


def looks_like_path(text: str) -> bool:
    """Whether a text can only be a path: `./model`, `~/model`, `/model`, `model.gguf`."""
    return text.startswith(("./", "../", "~", "/")) or text.endswith((".gguf", ".jsonl", ".safetensors"))


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):  # a template with line breaks or a NUL is not a file name
        return False
