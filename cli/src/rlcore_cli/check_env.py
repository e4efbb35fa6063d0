"""`rlcore check env`: checks an environment without a model or a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from rlcore_cli.arguments import AsJson

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Registered environment, dotted path of a class or reward function, or a task of --config.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Key of the environment; data.KEY=VALUE sets a key of its dataset.", show_default=False
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Config whose environment and data are used.", show_default=False),
]
RowsFile = Annotated[
    Path | None, typer.Option("--rows", metavar="FILE", help="JSON Lines file with prompts and metadata.", show_default=False)
]


def check_env(
    name: Name,
    settings: Settings = None,
    config: ConfigFile = None,
    rows: RowsFile = None,
    num_rows: Annotated[int, typer.Option(help="Number of rows to use.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Check an environment without a model: types and sizes, unchanged arguments, determinism, pickling, metrics, scores.

    Uses the rows of --rows or --config, or else the dataset with the name of the environment. A row of --rows has `messages`,
    or a text as `prompt`, `question` or `problem`; its other fields are the metadata. Exit code: 1 if a check failed.

    Example:
        rlcore check env sliding_puzzle data.size=2
        rlcore check env my_package.my_environment.MyEnvironment --rows rows.jsonl
        rlcore check env my_rewards.short --rows rows.jsonl
        rlcore check env my_task --config config.yaml
    """
    from rl_train.diagnostics import Diagnosis, DiagnosisStatus
    from rl_train.workbench.check import check_environment, hidden_tokens_check
    from rl_train.workbench.trial import open_trial

    trial = open_trial(name, settings or [], config=config, rows=rows, limit=num_rows)
    results = []
    few = f"{len(trial.rows)} of {trial.total} rows, --num-rows N for more"
    note = [Diagnosis(status=DiagnosisStatus.NOTE, name="rows", found=few)] if len(trial.rows) < trial.total else []
    for result in chain(check_environment(trial), hidden_tokens_check(trial), note):
        results.append(result)
        if not as_json:
            print(f"{result.status:<7} {result.name}: {result.found}")
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    if any(result.status is DiagnosisStatus.FAILED for result in results):
        raise typer.Exit(1)
