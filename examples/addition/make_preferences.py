"""Writes the preference pairs of `examples/dpo_addition.yaml`: the correct sum and the sum without carries.

python examples/addition/make_preferences.py examples/addition/preferences
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", 512), ("validation", 128)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(pair) + "\n" for pair in preferences(split, number))


if __name__ == "__main__":
    main()
