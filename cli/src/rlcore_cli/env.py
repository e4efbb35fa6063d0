"""Commands for environments, without a model or a run.

`rlcore check env` checks one, `rlcore env play` lets a person, a script or a random player play against it, and
`rlcore env rescore` scores the stored rollouts of a run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_core.errors import UserError
from rlcore_cli.arguments import AsJson, Overrides, counted, integers
from rlcore_cli.lazy import lazy_app

if TYPE_CHECKING:
    from rl_train.workbench.rescore import RescoredRollout

ENV_COMMANDS = {
    "play": ("rlcore_cli.env:play_env", "Play one rollout against an environment and print each turn and reward."),
    "rescore": ("rlcore_cli.env:rescore_run", "Score the stored rollouts of a run again and print the differences."),
}
"""Command name: import path of its function, and its line in `rlcore env --help`."""
app = lazy_app(ENV_COMMANDS)


@app.callback()
def env() -> None:
    """Develop an environment without a model or a run. `rlcore check env` checks it.

    Example:
        rlcore env play guess
        rlcore env rescore runs/config
    """


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
    from rl_train.workbench.play import open_trial

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


class PlayerKind(StrEnum):
    """Who answers."""

    PERSON = "person"
    RANDOM = "random"
    SCRIPT = "script"


def play_env(
    name: Name,
    settings: Settings = None,
    config: ConfigFile = None,
    rows: RowsFile = None,
    row: Annotated[int, typer.Option(help="Number of the row, from 0.", min=0)] = 0,
    player: Annotated[PlayerKind | None, typer.Option(help="Who answers: person (default), random or script.")] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers of --player script, one per line; \\n is a line break.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --player random.")] = 0,
    turns: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of turns; by default as many as the environment declares, or 100 for a class by its path.",
            min=1,
        ),
    ] = None,
) -> None:
    """Play one rollout against an environment and print each turn, message and reward.

    By default, you type one line per turn; Ctrl-D ends the rollout. The random player answers with a word or number of the
    conversation. In an environment with tools, a line `/call NAME {"argument": 1}` of an answer calls a tool.

    Example:
        rlcore env play guess
        rlcore env play sliding_puzzle data.size=2 --player random --seed 3
        rlcore env play math --rows rows.jsonl --player script --script answers.txt
    """
    from rl_train.workbench.play import open_trial, play, random_player, scripted_player

    kind = player or (PlayerKind.PERSON if script is None else PlayerKind.SCRIPT)
    if (kind is PlayerKind.SCRIPT) != (script is not None):
        raise UserError("--player script and --script FILE belong together: give both or neither.")
    trial = open_trial(name, settings or [], config=config, rows=rows, limit=row + 1)
    if row >= len(trial.rows):
        raise UserError(f"--row {row}: there are only {len(trial.rows)} rows, numbered from 0.")
    answers = _lines_of(script) if script is not None else []
    players: dict[PlayerKind, Any] = {
        PlayerKind.PERSON: _person,
        PlayerKind.RANDOM: random_player(seed),
        PlayerKind.SCRIPT: scripted_player([line.replace("\\n", "\n") for line in answers]),
    }
    chosen = trial.rows[row]
    _print_messages(chosen.messages)
    environment = trial.make()
    total, number, ended, limit = 0.0, 0, False, turns or trial.max_turns
    try:
        for number, turn in enumerate(
            play(
                environment,
                trial.task,
                chosen,
                players[kind],
                max_turns=limit,
                on_open=_print_messages,
                has_tools=trial.reads_tool_calls,
            ),
            start=1,
        ):
            if kind is not PlayerKind.PERSON:
                print(f"assistant: {turn.answer}")
            total += trial.reward_of(turn.rewards)
            shown = ", ".join(f"{name} {value:g}" for name, value in turn.rewards.items()) if turn.scored else "not scored"
            print(f"  turn {number}: {shown}{'' if turn.parsed is None else f'; parsed answer {turn.parsed!r}'}")
            _print_messages(turn.replies)
            ended = turn.ended
        if ended:
            print("  the environment ended the rollout")
        elif number == limit:
            print(f"  the environment has not ended the rollout after {limit} turns, the maximum; --turns N sets another")
    finally:
        environment.shutdown()
    print(f"total reward {total:g} after {counted(number, 'turn')}")


def _lines_of(script: Path) -> list[str]:
    try:
        return script.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--script {script} cannot be read: {error}. Give a UTF-8 text file with one answer per line."
        ) from error


def _person(log: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return input("assistant: ")
    except EOFError:
        print(file=sys.stdout)
        return None


def _print_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    from rl_train.data.image_sources import described

    for message in messages:
        print(f"{message['role']}: {described(message['content'])}")


_SHOWN_CHARACTERS = 60


def rescore_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Config instead of that of the run.", show_default=False)
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Steps, for example 1,5,10; all by default.", show_default=False)] = None,
    show: Annotated[int, typer.Option(help="Number of differences to print.", min=0)] = 10,
    as_json: AsJson = False,
) -> None:
    """Score the stored rollouts of a run again and print the differences, for example after a change of the environment.

    Environments and data are those of the run's config, with the overrides. Tokens and weights are not needed.

    Example:
        rlcore env rescore runs/config
        rlcore env rescore runs/config env.math.require_box=false --steps 10,20
    """
    from rl_train.workbench.rescore import rescore

    rows = list(rescore(run, overrides or [], config=config, steps=integers(steps, "--steps", "1,5,10")))
    changed = [row for row in rows if row.differs]
    if as_json:
        summary = {"rollouts": len(rows), "changed": len(changed), "differences": [asdict(row) for row in changed]}
        print(json.dumps(summary, indent=2))
        return
    print(f"{len(rows)} rollouts scored again; {len(changed)} differ")
    for name in sorted({name for row in rows for name in (*row.before, *row.after)}):
        before, after = (_mean([getattr(row, side).get(name, 0.0) for row in rows]) for side in ("before", "after"))
        print(f"  {name}: mean {before:.4f} before, {after:.4f} now")
    for row in changed[:show]:
        text = row.completion if len(row.completion) <= _SHOWN_CHARACTERS else f"...{row.completion[-_SHOWN_CHARACTERS:]}"
        rewards = f"{_rewards(row, 'before')} -> {_rewards(row, 'after')}"
        print(f"  step {row.step}, prompt {row.index}, sample {row.sample}: {rewards}  {text!r}")
    if len(changed) > show:
        print(f"  and {len(changed) - show} more")


def _rewards(row: RescoredRollout, side: str) -> str:
    if not (row.was_scored if side == "before" else row.is_scored):
        return "not scored"
    rewards: dict[str, float] = getattr(row, side)
    return ", ".join(f"{name} {value:g}" for name, value in sorted(rewards.items())) or "no reward"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
