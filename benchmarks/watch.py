"""Measure the CPU time of an update of `rlcore watch`: a step is added to a run; page, state and rollouts are read.

    python benchmarks/watch.py --steps 10000 --megabytes 100 --output benchmarks/results/watch.md

The run is synthetic: metrics with the names of the quickstart's, rollouts of 256 tokens. The time is that of the server;
a browser is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rlcore_cli.watch import LivePage

METRICS = 66
ROWS = 4
TOKENS = 256
UPDATES = 9


class SyntheticRun:
    """A run folder that grows step by step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._random, self._step = folder, random.Random(0), 0
        (folder / "rollouts").mkdir(parents=True)
        (folder / "status.json").write_text('{"state": "running"}')
        (folder / "config.yaml").write_text("grpo: {max_num_steps: 20000}\n")
        names = [
            "reward/mean",
            "length/mean",
            "entropy/sampled",
            "time/step_s",
            "time/rollout_s",
            "time/train_s",
            "tokens_per_s",
        ]
        self._names = [*names, *(f"own/metric_{number}" for number in range(METRICS - len(names)))]

    def add_step(self, rollout_bytes: int) -> int:
        """Append a step with about this many bytes of rollouts."""
        self._step += 1
        values = {name: self._random.random() for name in self._names}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self._step, **values}) + "\n")
        tokens = [self._random.randrange(50_000) for _ in range(TOKENS)]
        logprobs = [-self._random.random() for _ in range(TOKENS)]
        row: dict[str, Any] = {"group": 0, "prompt": "a question", "tokens": tokens, "logprobs": logprobs, "reward": 1.0}
        row["completion"] = "x" * max(0, rollout_bytes // ROWS - len(json.dumps(row)))
        text = "".join(json.dumps({**row, "sample": sample}) + "\n" for sample in range(ROWS))
        (self.folder / "rollouts" / f"step_{self._step:06d}.jsonl").write_text(text)
        return self._step


def measure(steps: int, megabytes: float) -> str:
    """A table of CPU-seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = SyntheticRun(Path(folder) / "run")
        size = int(megabytes * 1e6 / steps)
        for _ in range(steps):
            run.add_step(size)
        page = LivePage(lambda: run.folder, waiting="")
        rows = [("first page", [_cpu(page.page)], len(page.page()))]
        updates, nothing, shown = [], [], []
        for _ in range(UPDATES):
            step = run.add_step(size)
            updates.append(_cpu(lambda: (page.state(), page.page())))
            shown.append(_cpu(lambda step=step: page.rollouts(step)))
            nothing.append(_cpu(page.state))
        rows += [("update after a new step", updates, len(page.page())), ("rollouts of the new step", shown, size)]
        rows += [("request without news", nothing, len(page.state()))]
        lines = [
            f"| {name} | {statistics.median(values):.3f} | {max(values):.3f} | {sent / 1e6:.2f} |"
            for name, values, sent in rows
        ]
    head = "| | CPU-seconds, median | most | megabytes sent |\n|---|---|---|---|\n"
    return head + "\n".join(lines) + "\n"


def _cpu(call: Any) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    title = f"# Updates of `rlcore watch`\n\n`python benchmarks/watch.py`: {options.steps} steps of {METRICS} metrics, "
    text = title + f"{options.megabytes:g} MB of rollouts, {UPDATES} updates.\n\n" + measure(options.steps, options.megabytes)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
