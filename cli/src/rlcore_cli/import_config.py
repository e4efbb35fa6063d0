"""`rlcore import-config`: converts a NeMo RL config and reports what happened to each key."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_core.errors import ConfigError
from rlcore_cli.arguments import counted

if TYPE_CHECKING:
    from rlcore_cli.importing.apply import Imported

OUTCOMES = ("unsupported", "renamed", "kept", "redundant")
"""In the order of the list: what needs attention comes first."""


def import_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The NeMo RL config, a YAML file.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Output file; standard output by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the new config and the list of keys as JSON.")] = False,
) -> None:
    """Convert a NeMo RL config and report what happened to each key.

    Lists every key of the NeMo RL config once, with its line and outcome (unsupported, renamed, kept or redundant) and the
    reason. Then checks the new config as `rlcore validate` does and lists its errors. Without --output, the list goes to
    standard error.

    Example:
        rlcore import-config grpo_math.yaml --output config.yaml
        rlcore validate config.yaml data.train.path=questions.jsonl
    """
    from rlcore_cli.importing.apply import import_config as run

    if output is not None and output.exists():
        raise ConfigError(f"{output} already exists. Remove it or choose another --output.")
    imported = run(config)
    text = f"# Converted from {config.name} (NeMo RL) by `rlcore import-config`.\n\n{imported.to_yaml()}"
    errors = _errors(text)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror or error}. Choose another --output.") from None
    if as_json:
        print(json.dumps({"config": imported.values, **_listed(imported), "errors": errors}, indent=2))
        return
    if output is None:
        print(text, end="")
    print("\n".join(_report(imported, errors, output)), file=sys.stderr if output is None else sys.stdout)


def _errors(text: str) -> list[str]:
    """The errors of `rlcore validate`, without source locations because the file is generated."""
    from rl_core.config.diagnostics import InvalidConfigError
    from rl_train.config.loader import load_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path)
        except InvalidConfigError as error:
            return [problem.text for problem in error.problems]
    return []


def _listed(imported: Imported) -> dict[str, Any]:
    return {
        "keys": [
            {
                "key": line.key,
                "value": line.value,
                "file": None if line.location is None else line.location.file,
                "line": None if line.location is None else line.location.line,
                "outcome": line.outcome,
                "new_keys": list(line.targets),
                "reason": line.reason,
            }
            for line in imported.lines
        ],
        "added": [{"key": one.key, "value": one.value, "reason": one.reason} for one in imported.added],
    }


def _report(imported: Imported, errors: list[str], output: Path | None) -> list[str]:
    from rl_core.config.diagnostics import show
    from rlcore_cli.importing.apply import describe

    rows = []
    for outcome in OUTCOMES:
        lines = [f"  {describe(line)}" for line in imported.lines if line.outcome == outcome]
        rows += [f"{outcome} ({len(lines)})", *lines, ""] if lines else []
    if imported.added:
        rows += [f"added ({len(imported.added)})"]
        rows += [f"  {one.key} = {show(one.value)}: {one.reason}" for one in imported.added] + [""]
    name = str(output) if output is not None else "The new config"
    if errors:
        count = counted(len(errors), "error")
        return [*rows, f"{name} does not pass `rlcore validate` yet ({count}):", *(f"  {it}" for it in errors)]
    return [*rows, f"{name} passes `rlcore validate`"]
