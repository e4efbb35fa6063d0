"""What a person sees of a run: a live display on a terminal, one plain line a step when piped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_core.interfaces.logger import Logger

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("validation/accuracy", "accuracy", ".3f"),
    ("validation/loss", "val loss", ".4f"),
    ("length/mean", "length", ".1f"),
    ("grad_norm", "grad", ".3f"),
    ("mismatch/kl", "mismatch", ".1e"),
    ("tokens_per_s", "tok/s", ".0f"),
    ("time/step_s", "s", ".2f"),
)
"""Metric, its short name, its format; in the order of a line."""


class ConsoleLogger(Logger):
    """Prints the few numbers that say whether a run is well.

    Args:
        total_steps: steps of the whole run.
        first_step: steps that were done before a resume.
        console: where to; standard output by default.
    """

    def __init__(self, *, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._total = total_steps
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, numbers="")
            self._progress.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show one step; a validation keeps its line above the live display."""
        numbers = "  ".join(f"{short} {metrics[name]:{form}}" for name, short, form in SHOWN if name in metrics)
        if self._progress is None:
            self._console.print(f"step {step}/{self._total}  {numbers}", soft_wrap=True)
            return
        if any(name.startswith("validation/") for name in metrics):
            self._progress.console.print(f"step {step}/{self._total}  {numbers}")
        self._progress.update(self._task, completed=step, numbers=numbers)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """The config is in the run folder; the screen stays for numbers."""

    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
