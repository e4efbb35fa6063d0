"""Success on held-out boards of the sliding puzzle, by whether earlier games passed through them.

    python benchmarks/learning/puzzle_boards.py runs/learning/sliding_puzzle

Held-out boards are never the start of a demonstration or of a game in training, but such games can pass through them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from intervals import difference, wilson
from tasks import TASKS

from rl_train.metrics.jsonl import read_jsonl


def boards(games: Iterable[Mapping[str, Any]]) -> set[str]:
    """The boards that the model has read in these games, as text."""
    return {board_of(message["content"]) for game in games for message in game["messages"] if message["role"] != "assistant"}


def board_of(text: str) -> str:
    """The board at the end of a message."""
    return text.rsplit("\n\n", 1)[-1]


def report(work: Path) -> Iterable[str]:
    """A line for each seed, kind of answer and kind of board."""
    task, demonstrated = TASKS["sliding_puzzle"], boards(read_jsonl(work / "demonstrations.jsonl"))
    before = read_jsonl(work / "before.prompts.jsonl")
    for run in sorted(work.glob("seed_*")):
        # Step 0 is the validation before training.
        played = [path for path in sorted(run.glob("rollouts/step_*.jsonl")) if path.stem != "step_000000"]
        passed = demonstrated | set().union(*(boards(read_jsonl(path)) for path in played))
        after = read_jsonl(work / f"after_{run.name.removeprefix('seed_')}.prompts.jsonl")
        for mode in ("sampled", "greedy"):
            pairs = [pair for pair in zip(before, after, strict=True) if pair[0]["mode"] == mode]
            for kind, seen in (("passed through before", True), ("never seen", False)):
                chosen = [pair for pair in pairs if (board_of(pair[0]["prompt"]) in passed) == seen]
                if not chosen:
                    continue
                prompts = [old["prompt"] for old, _ in chosen]
                assert prompts == [new["prompt"] for _, new in chosen]
                old, new = (
                    [task.succeeded(row["prompt"], row["completions"][0]) for row in side] for side in zip(*chosen, strict=True)
                )
                low, high = difference(prompts, old, new)
                yield (
                    f"{run.name}, {mode}, {kind}: {len(chosen)} games on {len(set(prompts))} boards, before {rate(old)}, "
                    f"after {rate(new)}, difference {sum(new) / len(new) - sum(old) / len(old):+.3f} [{low:+.3f}, {high:+.3f}]"
                )


def rate(trials: list[bool]) -> str:
    """A proportion with its interval."""
    low, high = wilson(sum(trials), len(trials))
    return f"{sum(trials) / len(trials):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="work folder of the task, with the runs")
    print(*report(parser.parse_args().work), sep="\n")
