"""Writes the preference pairs of `examples/dpo_addition.yaml`: the correct sum and the sum without carries.

python examples/addition/make_preferences.py examples/addition/preferences

With `--unpaired`, it writes the answers of `examples/kto_addition.yaml`: each sum has one of the two, with a label.

python examples/addition/make_preferences.py examples/addition/labelled --unpaired
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_envs.arithmetic import ArithmeticDataset, add_without_carrying


def preferences(split: str, number: int) -> Iterator[dict[str, str]]:
    """`number` preference pairs for sums of the split. Sums without a carry are skipped; most two-digit sums have one."""
    sums = ArithmeticDataset({"num_samples": 3 * number, "min_digits": 2, "split": split})
    for index in range(len(sums)):
        problem = sums.problem(index)
        forgotten = add_without_carrying(problem.left, problem.right)
        if forgotten != problem.answer and number > 0:
            number -= 1
            yield {
                "prompt": f"{problem.left}+{problem.right}=",
                "chosen": str(problem.answer),
                "rejected": str(forgotten),
            }


def labelled(split: str, number: int) -> Iterator[dict[str, Any]]:
    """`number` answers to sums of the split, of which every second is wrong."""
    for index, pair in enumerate(preferences(split, number)):
        label = index % 2 == 0
        yield {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unpaired", action="store_true", help="write one labelled answer per sum")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    make, rows = (labelled, 2) if options.unpaired else (preferences, 1)
    for split, number in (("train", 512), ("validation", 128)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in make(split, rows * number))


if __name__ == "__main__":
    main()
