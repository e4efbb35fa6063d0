"""What all loggers here have in common: JSON lines in the run folder, whose steps can be replaced."""

import json

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
