"""What a person sees of a run: a live display on a terminal, one plain line a step when piped."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_core.interfaces.logger import Logger

_log = logging.getLogger("rlcore")

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


class _Screen(Console):
    """A console whose reader may leave, as in `rlcore train ... | head`: nothing is written from then on, and nothing ends."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What Python flushes at its own end must find an open file.
        closed = os.open(os.devnull, os.O_WRONLY)
        os.dup2(closed, sys.stdout.fileno())
        os.close(closed)
        _log.warning("nobody reads standard output any more; the run goes on without it")


class _Display(Progress):
    """The bar with the newest numbers below it, in as many columns as the terminal is wide."""

    numbers: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Columns(self.numbers, padding=(0, 2))


class ConsoleLogger(Logger):
    """Prints the few numbers that say whether a run is well; a run outlives whoever reads them.

    Args:
        total_steps: steps of the whole run.
        first_step: steps that were done before a resume.
        console: where to; standard output by default.
    """

    def __init__(self, *, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or _Screen(file=sys.stdout, highlight=False)
        self._total = total_steps
        self._display: _Display | None = None
        if self._console.is_terminal:
            self._display = _Display(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._display.add_task("train", total=total_steps, completed=first_step)
            self._display.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show one step; what it validated keeps a line above the live display."""
        numbers = {name: f"{short} {metrics[name]:{form}}" for name, short, form in SHOWN if name in metrics}
        if self._display is None:
            self._console.print(f"step {step}/{self._total}  {'  '.join(numbers.values())}", soft_wrap=True)
            return
        validated = [number for name, number in numbers.items() if name.startswith("validation/")]
        if validated:
            self._display.console.print(f"step {step}/{self._total}  {'  '.join(validated)}")
        self._display.numbers = tuple(numbers.values())
        self._display.update(self._task, completed=step, refresh=True)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """The config is in the run folder; the screen stays for numbers."""

    def finish(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None
