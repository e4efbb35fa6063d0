"""What a run is doing now, in one line: redrawn on a terminal, and printed at intervals if output is redirected."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

PROGRESS = "progress.txt"
"""In the run folder while a run is in progress: what it is doing now."""
WRITE_EVERY_S = 2.0
"""Seconds after which that file is written again."""
PRINT_EVERY_S = 30.0
"""Seconds without a new line after which a redirected output gets one."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """Turns of rollouts that an engine is sampling in one call."""

    rows: int
    """Number of turns."""
    are_rollouts: bool
    """Whether a rollout has only one turn."""
    read: Callable[[], tuple[int, int] | None]
    """Returns the number of turns that have ended, and of tokens sampled so far; None if the engine does not report them."""


@dataclass(kw_only=True)
class RolloutCounts:
    """Rollouts since the run started."""

    begun: int = 0
    """Number of rollouts that have begun."""
    ended: int = 0
    """Number of rollouts that have ended."""
    tokens: int = 0
    """Number of tokens of the turns that were sampled."""
    sampled: int = 0
    """Number of rollouts that batches have sampled completely. They end when they have been scored."""
    batch: SampledBatch | None = None
    """The batch that is being sampled."""


class Progress:
    """The phase of a run and how far it is. The thread of the run writes it; the console reads it.

    Attributes:
        phase: current phase; None between two phases.
        rollouts: counts that the event loop of the rollouts updates.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self.rollouts = RolloutCounts()
        self._since = time.perf_counter()
        self._before = RolloutCounts()
        """The counts when the phase began."""
        self._seconds: dict[str, float] = {}
        """How long each phase took when it last ended."""

    def begin(self, phase: str | None) -> None:
        """The run enters a phase, or returns to one."""
        self.phase, self._since = phase, time.perf_counter()
        self._before = replace(self.rollouts)

    def end(self, outer: str | None) -> None:
        """The current phase has ended; the run continues with the phase around it, if there is one."""
        if self.phase is not None:
            self._seconds[self.phase] = time.perf_counter() - self._since
        self.begin(outer)

    def __str__(self) -> str:
        phase, since, now, before = self.phase, self._since, replace(self.rollouts), self._before
        if phase is None:
            return ""
        seconds, batch = time.perf_counter() - since, now.batch
        reported = None if batch is None else batch.read()
        rows, tokens = reported or (0, 0)
        tokens += now.tokens - before.tokens
        ended, total = now.ended - before.ended, now.begun - before.ended
        sampled = now.sampled - before.sampled + (rows if batch is not None and batch.are_rollouts else 0)
        done = max(ended, min(sampled, total))
        texts = [f"{phase} {_clock(seconds)}"]
        if total > 0:
            texts.append(f"{done}/{total} rollouts")
            if batch is None and done > ended:
                texts[-1] = f"{ended}/{total} rollouts scored"
            elif batch is not None and reported is None and not done:
                texts[-1] = f"{total} rollouts in one batch"
            elif batch is not None and not batch.are_rollouts:
                texts.append(f"{rows}/{batch.rows} in this turn")
        if tokens and seconds > 0:
            texts.append(f"{tokens / seconds:.0f} tokens/s")
        if 0 < done < total:
            texts.append(f"about {_clock(seconds / done * (total - done))} left")
        elif phase in self._seconds:
            texts.append(f"{_clock(self._seconds[phase])} in the last step")
        return "  ".join(texts)


class ProgressPrinter:
    """Prints the progress of a run while nothing else is printed, from its own thread. A context manager.

    Args:
        describe: returns the line; '' for none.
        write: prints a line.
        every_s: seconds without a line after which one is printed.
    """

    def __init__(self, describe: Callable[[], str], write: Callable[[str], None], *, every_s: float = PRINT_EVERY_S) -> None:
        self._describe, self._write, self._every_s = describe, write, every_s
        self._printed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rlcore-progress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def printed(self) -> None:
        """Something else was printed: the next line is due after another interval."""
        self._printed.set()

    def close(self) -> None:
        """Stop the thread; may be called repeatedly."""
        self._closing = True
        self._printed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            if self._printed.wait(self._every_s):
                self._printed.clear()
            elif line := self._describe():
                self._write(line)


@contextmanager
def reported_start(what: str, write: Callable[[str], None], *, every_s: float = PRINT_EVERY_S) -> Iterator[Callable[[], str]]:
    """Report at intervals how long the block has been running. Yields a function that returns the reported line.

    Args:
        what: what it does, such as `loading sums:`.
        write: prints a line.
        every_s: the interval, in seconds.
    """
    progress = Progress()
    progress.begin(what)
    describe = partial(str, progress)
    printer = ProgressPrinter(describe, write, every_s=every_s)
    printer.start()
    try:
        yield describe
    finally:
        printer.close()


@contextmanager
def progress_file(folder: Path, describe: Callable[[], str]) -> Iterator[None]:
    """Keep a file with the progress of a run in its folder during the block, for `rlcore watch`.

    Args:
        folder: the run folder.
        describe: returns the progress; '' for none.
    """
    path = folder / PROGRESS
    partial = path.with_name(f".{PROGRESS}.tmp")

    def write(line: str) -> None:
        with suppress(OSError):  # a full disk or a deleted folder ends the run where it writes its results
            partial.write_text(line, encoding="utf-8")
            os.replace(partial, path)

    printer = ProgressPrinter(describe, write, every_s=WRITE_EVERY_S)
    printer.start()
    try:
        yield
    finally:
        printer.close()
        path.unlink(missing_ok=True)


def _clock(seconds: float) -> str:
    """`45 s`, `3:05 min` or `1:02 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
