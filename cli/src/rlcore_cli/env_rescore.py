"""`rlcore env rescore`: scores the stored rollouts of a run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore_cli.arguments import AsJson, Overrides, integers

if TYPE_CHECKING:
    from rl_train.workbench.rescore import RescoredRollout

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
        print(
            json.dumps(
                {"rollouts": len(rows), "changed": len(changed), "differences": [_plain(row) for row in changed]}, indent=2
            )
        )
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


def _plain(row: RescoredRollout) -> dict[str, Any]:
    names = ("step", "task", "index", "sample", "completion", "before", "after", "was_scored", "is_scored")
    return {name: getattr(row, name) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
