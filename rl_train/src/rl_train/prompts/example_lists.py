"""Lists of few-shot examples: packaged ones by name, and files in YAML or JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_core.config.diagnostics import Problems
from rl_core.config.source_tree import SourceLocation
from rl_core.errors import DataError
from rl_core.plugins.component import did_you_mean
from rl_train.yaml_reader import read_yaml

PACKAGED_EXAMPLES = Path(__file__).parent / "prompt_examples"


def packaged_names(folder: Path) -> list[str]:
    """The names of the YAML files in a packaged folder and its subfolders: their paths without the suffix."""
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_file(path_or_name: str | Path, *, packaged: Path, kind: str) -> Path:
    """The file at a path, or the packaged file of that name.

    Args:
        path_or_name: The path or name.
        packaged: The folder of the packaged files.
        kind: What the file contains, for errors: "prompt", "list of examples".

    Raises:
        DataError: There is neither such a file nor such a packaged one.
    """
    for path in (Path(path_or_name), packaged / f"{path_or_name}.yaml"):
        if path.is_file():
            return path
    names = packaged_names(packaged)
    raise DataError(
        f"there is neither a file nor a packaged {kind} {str(path_or_name)!r}.{did_you_mean(str(path_or_name), names)} "
        f"Packaged {kind.partition(' ')[0]}s: {', '.join(names)}"
    )


def packaged_examples() -> list[str]:
    """The names of the packaged lists of examples."""
    return packaged_names(PACKAGED_EXAMPLES)


def find_examples(path_or_name: str | Path) -> Path:
    """The file of a list of examples; raises DataError as `find_file`."""
    return find_file(path_or_name, packaged=PACKAGED_EXAMPLES, kind="list of examples")


def read_examples(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The examples of a file: a YAML list of mappings, or JSON Lines.

    Args:
        path: The file; `.yaml` and `.yml` are YAML, any other is JSON Lines.
        limit: Read only this many; all by default.

    Raises:
        DataError: The file does not exist, has no examples, or is in another format; the message has the line.
    """
    try:
        is_yaml = path.suffix in (".yaml", ".yml")
        examples = _from_yaml(path)[:limit] if is_yaml else _from_json_lines(path, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the examples {path} cannot be read: {error}") from error
    if not examples:
        raise DataError(f"the file {path} has no examples")
    return examples


def _from_yaml(path: Path) -> list[dict[str, Any]]:
    problems = Problems()
    location = SourceLocation(str(path), 1, 1, str(path))
    root = read_yaml(path.read_text(encoding="utf-8-sig"), location=location, problems=problems)
    if problems.found:
        raise DataError("\n".join(str(problem) for problem in problems.found))
    items = root.value if root is not None and isinstance(root.value, list) else None
    if items is None:
        raise DataError(f"{path}: expected a list of examples, each a mapping of its fields")
    for item in items:
        if not isinstance(item.value, dict):
            raise DataError(f"{item.location}: expected an example, a mapping of its fields")
    return [item.plain() for item in items]


def _from_json_lines(path: Path, limit: int | None) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and len(examples) == limit:
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: invalid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, found a {type(row).__name__}")
            examples.append(row)
    return examples
