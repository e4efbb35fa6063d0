"""`rlcore import-config`: a config of NeMo RL as one of ours, and a list of what became of every key. It trains nothing."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_core.config.importing.apply import Imported

OUTCOMES = ("not honoured", "renamed", "taken over", "needs nothing")
"""In the order in which the list has them: what the reader must look at comes first."""


def import_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Their YAML file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; without it, ours goes to standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ours and the list as JSON, for programs.")] = False,
) -> None:
    """Write a config of NeMo RL as one of ours.

    Every key of theirs is listed once, with its line: taken over, renamed, needing nothing here, or not honoured, and why.
    What was written is then checked as by `rlcore validate`, and its mistakes are listed too. Without --output the list
    goes to standard error.

    Example:
        rlcore import-config grpo_math.yaml --output ours.yaml
        rlcore validate ours.yaml data.train.path=questions.jsonl
    """
    from rl_core.config.importing.apply import import_config as run
    from rl_core.config.importing.nemo_rl.table import NEMO_RL
    from rl_core.errors import ConfigError

    if output is not None and output.exists():
        raise ConfigError(f"{output} is already there: remove it, or give --output another name.")
    imported = run(config, NEMO_RL)
    text = f"# {config.name}, a config of {NEMO_RL.framework}, by `rlcore import-config`.\n\n{imported.to_yaml()}"
    mistakes = _mistakes(text)
    if output is not None:
        _write(text, output)
    if as_json:
        print(json.dumps({"config": imported.values, **_listed(imported), "mistakes": mistakes}, indent=2))
        return
    if output is None:
        print(text, end="")
    print("\n".join(_report(imported, mistakes, output)), file=sys.stderr if output is None else sys.stdout)


def _write(text: str, output: Path) -> None:
    from rl_core.errors import ConfigError

    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}.") from None


def _mistakes(text: str) -> list[str]:
    """What `rlcore validate` would say of it, without places: the file is one that nobody has written by hand."""
    from rl_core.config.diagnostics import InvalidConfigError
    from rl_core.config.loader import load_config
    from rl_core.config.written import dotted

    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ours.yaml"
        ours.write_text(text, encoding="utf-8")
        try:
            load_config(ours)
        except InvalidConfigError as error:
            return [f"{dotted(problem.path)}: {problem.message}" for problem in error.problems]
    return []


def _listed(imported: Imported) -> dict[str, Any]:
    return {
        "keys": [
            {
                "key": line.key,
                "value": line.value,
                "file": None if line.place is None else line.place.file,
                "line": None if line.place is None else line.place.line,
                "outcome": line.outcome,
                "ours": list(line.targets),
                "reason": line.reason,
            }
            for line in imported.lines
        ],
        "added": [{"key": one.key, "value": one.value, "reason": one.reason} for one in imported.added],
    }


def _report(imported: Imported, mistakes: list[str], output: Path | None) -> list[str]:
    from rl_core.config.diagnostics import show
    from rl_core.config.importing.apply import describe

    rows = []
    for outcome in OUTCOMES:
        lines = [f"  {describe(line)}" for line in imported.lines if line.outcome == outcome]
        rows += [f"{outcome} ({len(lines)})", *lines, ""] if lines else []
    if imported.added:
        rows += [f"added ({len(imported.added)})"]
        rows += [f"  {one.key} = {show(one.value)}: {one.reason}" for one in imported.added] + [""]
    written = str(output) if output is not None else "what was printed"
    if mistakes:
        count = f"{len(mistakes)} {'mistake' if len(mistakes) == 1 else 'mistakes'}"
        return [*rows, f"{written} does not yet pass `rlcore validate`, which finds {count}:", *(f"  {it}" for it in mistakes)]
    return [*rows, f"{written} passes `rlcore validate`"]
