"""Files that a config refers to, files that are complete or absent even after a crash, and sizes in bytes.

A path in a config is relative to the working directory, else to the file that contains it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from rl_core.config.diagnostics import SourceLocation
from rl_core.errors import UserError


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


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: content and new name are on disk when this returns; until then, the old file is unchanged.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the folder may not exist
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_UNITS: Final = {"MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}


def available_memory() -> int:
    """Bytes that processes can use on this machine now, without those that others use."""
    return int(psutil.virtual_memory().available)


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as `80GiB`.

    Raises:
        UserError: It is not a positive number with a unit.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(matched.group(2).upper()) if matched else None
    if matched is None or unit is None or float(matched.group(1)) == 0:
        raise UserError(f"{option} {text} is not a size. Write a number with MiB, GiB, MB or GB: {option} 24GiB.")
    return int(float(matched.group(1)) * unit)


def format_size(num_bytes: float) -> str:
    """A size in the largest binary unit in which it is at least 1, such as `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
