"""`rlcore train`: run a config, show how it goes, and at the end what it came to and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlcore_cli.arguments import Config, Overrides

if TYPE_CHECKING:
    from rl_core.assembly.launch import Finished

DRAWN = (("validation/accuracy", "validation accuracy"), ("validation/loss", "validation loss"), ("reward/mean", "mean reward"))
"""The curves that a run ends with, where it has them."""


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(help="auto: continue the newest unfinished run of this name; never: start a new one; or a path."),
    ] = "auto",
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change", help="Resume under another config than the checkpoint's; the present one applies."
        ),
    ] = False,
) -> None:
    """Train by a config, from its last checkpoint if there is one.

    Ctrl-C, SIGTERM and SIGHUP end the run after the step under way, with a checkpoint; the same command continues it. A second
    signal ends it at once. `checkpointing.max_time` ends it in the same way before a job's time is over.

    Example:
        rlcore train examples/grpo_addition.yaml
        rlcore train config.yaml grpo.max_num_steps=20 cluster.workers_per_node=2
        rlcore train config.yaml --resume runs/config/checkpoints/step_000010
    """
    import os

    # Before torch is loaded: threads that spin while they wait slow every other process of a laptop down.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from rl_core.assembly.launch import train as launch

    finished = launch(config, overrides or [], resume=resume, allow_config_change=allow_config_change)
    _tell(finished)


def _tell(finished: Finished) -> None:
    from rlcore_cli.curve import draw, read_series
    from rlcore_cli.report.scales import format_duration

    metrics = finished.folder / "metrics.jsonl"
    for name, title in DRAWN:
        series = read_series(metrics, name)
        if len(series.steps) > 1:
            print(f"\n{title}: {series.values[0]:.3f} at step {series.steps[0]}, {series.values[-1]:.3f} at {series.steps[-1]}")
            print(draw([("braille", series)], title))
    steps = "1 step" if finished.steps == 1 else f"{finished.steps} steps"
    print(f"\n{steps} done; training took {format_duration(finished.training_seconds)}")
    print(f"run folder: {finished.folder}")
