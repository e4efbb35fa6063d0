"""`rlcore train`: runs a config, shows progress, and prints the learning curves and the run folder at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore_cli.arguments import Bases, Config, Overrides, config_files

if TYPE_CHECKING:
    from rl_train.launch.train import RunResult

DRAWN = (("validation/accuracy", "validation accuracy"), ("validation/loss", "validation loss"), ("reward/mean", "mean reward"))
"""Metrics whose curves are printed at the end, if the run recorded them."""


def train(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    resume: Annotated[
        str,
        typer.Option(help="auto: resume the newest unfinished run of this name; never: start a new run; or a path."),
    ] = "auto",
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change",
            help="Resume although the config, or code or files that it names, differ from the checkpoint's; the current ones "
            "apply.",
        ),
    ] = False,
    show_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Every STEPS steps, print a prompt with its best and its worst sample with rewards.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Train on the recorded rollouts of this run folder instead of sampling."),
    ] = None,
) -> None:
    """Train with a config, resuming from its last checkpoint if there is one.

    --config FILE layers CONFIG over another config; grpo.yaml and sft.yaml are packaged.

    Ctrl-C, SIGTERM and SIGHUP stop the run after the current step and save a checkpoint; the same command resumes it. A second
    signal stops it at once. `checkpointing.max_time` stops it in the same way before a job's time limit.

    Example:
        rlcore train examples/grpo_addition.yaml
        rlcore train config.yaml grpo.max_num_steps=20 cluster.workers_per_node=2
        rlcore train config.yaml --show-samples 10
        rlcore train --config grpo.yaml config.yaml
        rlcore train config.yaml --resume runs/config/checkpoints/step_000010
        rlcore train config.yaml --replay runs/config
    """
    from rl_train.config.loader import load_config

    files, changes = config_files(config, bases, overrides)
    # Importing PyTorch and Ray takes seconds: the config's mistakes are reported before, and what is going to run.
    loaded = load_config(files, changes)
    name = loaded.run.logger.run_name or loaded.path.stem
    print(f"config {loaded.path}, run {name}: loading PyTorch and Ray", file=sys.stderr, flush=True)
    from rl_train.launch.train import train as launch

    finished = launch(
        files, changes, resume=resume, allow_config_change=allow_config_change, show_samples=show_samples, replay=replay
    )
    _print_results(finished)


def _print_results(finished: RunResult) -> None:
    from rlcore_cli.curve import draw
    from rlcore_cli.report.chart import format_duration
    from rlcore_cli.report.run_folder import read_run_folder

    run = read_run_folder(finished.folder)
    for name, title in DRAWN:
        series = run.curve(name)
        if len(series.steps) > 1:
            first, last = (f"{series.values[at]:.3f} at step {series.steps[at]}" for at in (0, -1))
            print(f"\n{title}: {first}, {last}" if len(set(series.values)) > 1 else "")
            print(draw([("braille", series)], title))
    steps = "1 step" if finished.steps == 1 else f"{finished.steps} steps"
    if finished.stopped is not None:
        print(f"\n{finished.stopped}")
    print(f"\n{steps} done; training took {format_duration(finished.training_seconds)}")
    print(f"run folder: {finished.folder}")
