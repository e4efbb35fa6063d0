"""Our loggers keep the promises of loggers."""

import io
import time

import pytest
from rich.console import Console
from written_metrics import mlflow_run, scalars, written_wandb_rows

from rl_train.metrics.console import ConsoleLogger
from rl_train.metrics.jsonl import JsonlLogger, read_jsonl
from rl_train.testing import LoggerConformance


def rows_of(series):
    """A step and one metric each."""
    return [(step, {name: value}) for name, pairs in series.items() for step, value in pairs]


class TestJsonl(LoggerConformance):
    component = "jsonl"

    @classmethod
    def make(cls, folder):
        return JsonlLogger(folder)

    @classmethod
    def written(cls, folder):
        return [(row.pop("step"), row) for row in read_jsonl(folder / "metrics.jsonl")]


class TestConsole(LoggerConformance):
    component = "console"

    @classmethod
    def make(cls, folder):
        return ConsoleLogger(total_steps=3, console=Console(file=io.StringIO()))


@pytest.mark.slow
class TestTensorBoard(LoggerConformance):
    component = "tensorboard"

    @classmethod
    def make(cls, folder):
        if any(folder.glob("tensorboard/*")):
            time.sleep(1.1)  # its readers order the files of a folder by the second in which they begin
        return super().make(folder)

    @classmethod
    def written(cls, folder):
        return rows_of(scalars(folder / "tensorboard"))


@pytest.mark.slow
class TestWandb(LoggerConformance):
    component = "wandb"

    @classmethod
    def make(cls, folder):
        if any(folder.glob("wandb/*")):
            time.sleep(1.1)  # its offline folders are named by the second
        return super().make(folder)

    @classmethod
    def written(cls, folder):
        resumed = len(list(folder.glob("wandb/offline-run-*"))) > 1
        rows = [row for rows in written_wandb_rows(folder, 5 if resumed else 4).values() for row in rows]
        others = ("_", "completions")  # of the library, and the table
        return [(row.pop("step"), {name: value for name, value in row.items() if not name.startswith(others)}) for row in rows]


@pytest.mark.full("tests/train/metrics/test_further_loggers.py; every run folder has a database, which takes seconds to create")
class TestMlflow(LoggerConformance):
    component = "mlflow"

    @classmethod
    def written(cls, folder):
        return rows_of(mlflow_run(folder)[2])
