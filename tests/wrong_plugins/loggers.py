"""Loggers that break a promise of loggers; all write JSON lines to the run folder in steps that can be replaced."""

import csv
import io
import json
from pathlib import Path

from rl_train.metrics.logger import Logger

METRICS, ROLLOUTS = "steps.jsonl", "rollouts.jsonl"


class Lines(Logger):
    mode = "a"

    def __init__(self, *, config, folder):
        self.folder = folder
        self.files = {name: self.open(name) for name in (METRICS, ROLLOUTS)}

    def open(self, name):
        return (self.folder / name).open(self.mode, encoding="utf-8", errors="backslashreplace")

    def write(self, name, row):
        self.files[name].write(json.dumps(row, ensure_ascii=False) + "\n")

    def log_metrics(self, metrics, step):
        self.write(METRICS, {"step": step, **metrics})

    def log_rollouts(self, rows, step):
        for row in rows:
            self.write(ROLLOUTS, {"step": step, **row})

    def finish(self):
        for file in self.files.values():
            file.close()


def written(folder):
    """Pairs of a step and its metrics."""
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row.pop("step"), row


class Right(Lines):
    """The right control: one JSON line for each step."""


class AddsTheStepToTheMetrics(Lines):
    """Writes the step into the mapping that other loggers get as well."""

    def log_metrics(self, metrics, step):
        metrics["step"] = step
        self.write(METRICS, metrics)


class ClosesOnce(Lines):
    """Closing it a second time is an error."""

    def finish(self):
        for name in list(self.files) or ["nothing to close"]:
            self.files.pop(name).close()


class CountsItsOwnSteps(Lines):
    """Numbers the steps itself, from 1, and so again after a resume."""

    count = 0

    def log_metrics(self, metrics, step):
        self.count += 1
        super().log_metrics(metrics, self.count)


class IgnoresErrorsOfTheDisk(Lines):
    """Continues without a file if it cannot open one."""

    def open(self, name):
        try:
            return super().open(name)
        except OSError:
            return io.StringIO()


class LosesTheLastSteps(Lines):
    """Writes two steps at a time, and `finish` does not write the rest."""

    def __init__(self, *, config, folder):
        super().__init__(config=config, folder=folder)
        self.waiting = []

    def log_metrics(self, metrics, step):
        self.waiting.append((metrics, step))
        if len(self.waiting) == 3:
            for each in self.waiting:
                super().log_metrics(*each)
            self.waiting = []


class PrintsEachStep(Lines):
    """Prints each step, in the middle of the display."""

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        print(f"step {step} {metrics.get('loss')}")


class RefusesNan(Lines):
    """Refuses NaN, which the loss of a diverging run has."""

    def log_metrics(self, metrics, step):
        self.files[METRICS].write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")


class RemovesMessages(Lines):
    """Removes the messages of each rollout before it writes them."""

    def log_rollouts(self, rows, step):
        for row in rows:
            row.pop("messages", None)
        super().log_rollouts(rows, step)


class StartsItsFileAgain(Lines):
    """Opens its file for writing, so that a resumed run deletes the earlier steps."""

    mode = "w"


class WritesEachStepTwice(Lines):
    """Writes each step when it is logged, and all of them again at the end."""

    def __init__(self, *, config, folder):
        super().__init__(config=config, folder=folder)
        self.logged = []

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        self.logged.append((dict(metrics), step))

    def finish(self):
        for metrics, step in self.logged:
            super().log_metrics(metrics, step)
        self.logged = []
        super().finish()


class WritesNamesOfTheFirstStep(Lines):
    """Has a column for each metric of the first step; others are an error."""

    table = None

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        if self.table is None:
            self.table = csv.DictWriter(self.open("table.csv"), ["step", *metrics])
        self.table.writerow({"step": step, **metrics})


class WritesStrictUnicode(Lines):
    """Cannot write an unpaired surrogate, which half of a character is."""

    def open(self, name):
        return (self.folder / name).open("a", encoding="utf-8")


class WritesThreeDecimals(Lines):
    """Rounds every value to three decimals, so that a small learning rate becomes zero."""

    def log_metrics(self, metrics, step):
        super().log_metrics({name: round(value, 3) for name, value in metrics.items()}, step)


class WritesToTheWorkingDirectory(Lines):
    """Keeps a copy of the metrics in the working directory."""

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        Path("latest.txt").write_text(f"{step} {metrics}\n")
