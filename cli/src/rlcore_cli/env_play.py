"""`rlcore env play`: a person, a script or a random player against an environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_core.errors import UserError
from rlcore_cli.check_env import ConfigFile, Name, RowsFile, Settings


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
    from rl_train.workbench.play import play, random_player, scripted_player
    from rl_train.workbench.trial import open_trial

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
    print(f"total reward {total:g} after {number} {'turn' if number == 1 else 'turns'}")


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
    for message in messages:
        print(f"{message['role']}: {message['content']}")
