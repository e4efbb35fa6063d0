"""Reads config files and the files they inherit from, or Python values, into one tree of values. Independent of the schema.

`defaults: base.yaml`, or a list of files, each relative to the file that names it. Parents are applied first, in order
and depth first; the values of the file itself override them. `grpo.yaml` and `sft.yaml` are packaged: they are found by
name, also as `configs/grpo.yaml`, if there is no such file.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from rl_core.config.diagnostics import Problems, nearest, show
from rl_core.config.source_tree import KeyPath, Node, SourceLocation, node_from_plain
from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_train.config.slots import is_named_by_user
from rl_train.yaml_reader import read_yaml

LARGEST_FILE = 1 << 20
"""Bytes; a larger file is not a hand-written config and was probably given by mistake."""

ConfigFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A config file, or several that are layered: the values of each override those of the files before it."""

BASE_CONFIGS = pathlib.Path(__file__).parent / "base_configs"
"""Folder of the packaged base configs."""

PROVENANCE = "provenance.json"
"""File in a run folder with the origin of the values of its config."""
_PARENTS = "defaults"


def as_paths(files: ConfigFiles) -> list[pathlib.Path]:
    """The config files, in the order in which they are applied."""
    return [pathlib.Path(files)] if isinstance(files, str | os.PathLike) else [pathlib.Path(file) for file in files]


def read_sources(files: ConfigFiles | Mapping[str, Any], *, problems: Problems) -> Node:
    """The files with everything that they inherit, layered.

    Args:
        files: The config files, at least one; or Python values.
        problems: Receives what is wrong with any of the files.

    Returns:
        The root mapping; empty if nothing could be read.
    """
    if isinstance(files, Mapping):
        return node_from_plain(files, location=SourceLocation(""))
    layers = []
    for path in as_paths(files):
        source = _existing_or_packaged(str(path))
        read = _read(source, referenced_at=None, open_files=(), problems=problems)
        location = SourceLocation(source, 1, 1, source)
        layers.append(read if read is not None else Node({}, location=location, key_location=location))
    return reduce(_merge, layers)


def refuse_missing(files: ConfigFiles) -> None:
    """Reports config files that do not exist, before anything else is imported.

    Raises:
        InvalidConfigError: A file does not exist.
    """
    problems = Problems()
    for path in as_paths(files):
        source = _existing_or_packaged(str(path))
        if "\0" not in source and not os.path.exists(source):
            problems.add(_unreadable(source, FileNotFoundError()), location=None, path=())
    problems.raise_if_any()


def search_modules_in(folders: Iterable[str]) -> None:
    """Replace `MODULE_FOLDERS`."""
    sys.path[:] = [entry for entry in sys.path if entry not in MODULE_FOLDERS]
    MODULE_FOLDERS[:] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path.extend(MODULE_FOLDERS)


def folders_of_files(written: Node) -> list[str]:
    """The folders of the files that values come from, and those of the files of a run if one of them is its copy.

    The folder of the packaged base configs is not among them.
    """
    files = dict.fromkeys(node.location.file for _, node in written.leaves() if node.location.file is not None)
    folders = dict.fromkeys(os.path.dirname(os.path.abspath(file)) for file in files)
    recorded = [each for folder in folders for each in _recorded_folders(pathlib.Path(folder) / PROVENANCE)]
    return [folder for folder in dict.fromkeys([*folders, *recorded]) if folder != str(BASE_CONFIGS)]


def _recorded_folders(provenance: pathlib.Path) -> list[str]:
    """The folders of the files of a run, whose own folder has a copy of the config; empty for other folders."""
    try:
        content = json.loads(provenance.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    folders = content.get("folders") if isinstance(content, dict) else None
    return [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, list) else []


def _existing_or_packaged(source: str, name: str | None = None) -> str:
    """The file itself, or the packaged base config of its name if there is no such file."""
    packaged = BASE_CONFIGS / (source if name is None else name).removeprefix("configs/")
    is_packaged = packaged.parent == BASE_CONFIGS and "\0" not in source and packaged.is_file()
    return str(packaged) if is_packaged and not os.path.exists(source) else source


def _read(source: str, *, referenced_at: SourceLocation | None, open_files: tuple[str, ...], problems: Problems) -> Node | None:
    real = os.path.realpath(source) if "\0" not in source else source
    if real in open_files:
        chain = " -> ".join(os.path.basename(file) for file in (*open_files[open_files.index(real) :], real))
        problems.add(
            f"These files inherit from each other in a cycle: {chain}. Remove one of the `defaults`.",
            location=referenced_at,
            path=(_PARENTS,),
        )
        problems.is_partial = True
        return None
    root = _root(source, referenced_at=referenced_at, problems=problems)
    if root is None:
        problems.is_partial = True
        return None
    start = SourceLocation(source, 1, 1, source)
    keys_of_file = {key: item for key, item in root.value.items() if key != _PARENTS}
    # An empty `grpo:` means the section with its defaults; it does not remove inherited values.
    for key, item in keys_of_file.items():
        if item.value is None and item.text == "":
            keys_of_file[key] = Node({}, location=item.location, key_location=item.key_location)
    merged = Node({}, location=start, key_location=start)
    for parent, location in _parents(root, problems=problems):
        parent_path = os.path.normpath(os.path.join(os.path.dirname(source), os.path.expanduser(parent)))
        parent_path = _existing_or_packaged(parent_path, parent)
        inherited = _read(parent_path, referenced_at=location, open_files=(*open_files, real), problems=problems)
        merged = merged if inherited is None else _merge(merged, inherited)
    return _merge(merged, Node(keys_of_file, location=root.location, key_location=root.key_location, replaces=root.replaces))


def _root(source: str, *, referenced_at: SourceLocation | None, problems: Problems) -> Node | None:
    """The mapping of one file; None if it cannot be read or is not a mapping, which is reported."""
    text = _text(source, referenced_at=referenced_at, problems=problems)
    if text is None:
        return None
    before = len(problems.found)
    start = SourceLocation(source, 1, 1, source)
    root = read_yaml(text, location=start, problems=problems)
    if root is None and len(problems.found) == before:
        return Node({}, location=start, key_location=start)
    if root is not None and not isinstance(root.value, dict):
        problems.add(
            f"A config must be a mapping of sections (`policy:`, `data:`, ...), not {show(root.plain())}.",
            location=root.location,
        )
        return None
    return root


def _parents(root: Node, *, problems: Problems) -> list[tuple[str, SourceLocation]]:
    named = root.child(_PARENTS)
    if named is None or named.value is None:
        return []
    items = named.value if isinstance(named.value, list) else [named]
    parents = []
    for item in items:
        if isinstance(item.value, str) and item.value:
            parents.append((item.value, item.location))
        else:
            problems.is_partial = True
            problems.add(
                f"must be a file or a list of files to inherit from; found {show(item.plain())}.",
                location=item.location,
                path=(_PARENTS,),
            )
    return parents


def _text(source: str, *, referenced_at: SourceLocation | None, problems: Problems) -> str | None:
    path = () if referenced_at is None else (_PARENTS,)
    try:
        with open(source, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        message = _unreadable(source, error)
        problems.add(message, location=referenced_at, path=path)
        return None
    if len(raw) > LARGEST_FILE:
        problems.add(
            f"{source} is larger than {LARGEST_FILE >> 10} KiB, so it is probably not a config: give a YAML config file.",
            location=referenced_at,
            path=path,
        )
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        problems.add(
            f"Invalid UTF-8 (byte 0x{raw[error.start]:02X}): save the config as UTF-8.",
            location=SourceLocation(source, line, column, source),
        )
        return None


def _unreadable(source: str, error: OSError | ValueError) -> str:
    match error:
        case FileNotFoundError():
            hint = _similar_files(source)
            return f"File {source} does not exist.{hint}"
        case IsADirectoryError():
            config = pathlib.Path(source) / "config.yaml"  # as `rlcore init` writes it
            return f"{source} is a folder: give {config if config.is_file() else 'a YAML file in it'}."
        case OSError():
            return f"{source} cannot be read: {error.strerror or error}."
        case _:
            return f"{source!r} is not a valid file name: {error}."


def _similar_files(source: str) -> str:
    folder = pathlib.Path(source).parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either."
    siblings = sorted(file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if not siblings:
        return ""
    meant = nearest(pathlib.Path(source).name, siblings)
    return f" Did you mean {folder / meant}?" if meant else ""


def _merge(base: Node, over: Node, path: KeyPath = ()) -> Node:
    """The inherited value overlaid with the inheriting one: mappings merge key by key, everything else is replaced.

    `null` removes an inherited section with a name that the user chose, such as a task. Without a value, it has its defaults.
    """
    if over.replaces or not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if base.is_default:
        return over if over.value else base
    merged: dict[str, Node] = dict(base.value)
    for key, item in over.value.items():
        if key in merged and item.value is None and item.text != "" and is_named_by_user((*path, key)):
            del merged[key]
        else:
            merged[key] = _merge(merged[key], item, (*path, key)) if key in merged else item
    return Node(merged, location=over.location, key_location=over.key_location)
