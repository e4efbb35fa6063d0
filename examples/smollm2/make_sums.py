"""Writes addition prompts with one worked example, for reinforcement learning. The output is deterministic.

    python examples/smollm2/make_sums.py examples/smollm2

A prompt is a system message that asks for a box, one worked example as an earlier turn, and the question. All sums of two
numbers from 1 to 12 are written, except the worked example's. A hash of the two numbers, in either order, decides whether
a sum is held out, so `3 + 9` in training does not reveal the held-out `9 + 3`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

LARGEST, SEED = 12, 0
EXAMPLE = (2, 5)
SYSTEM = "You do sums. Put the final answer in \\boxed{}."


def question(a: int, b: int) -> str:
    """The user message."""
    return f"What is {a} + {b}?"


def worked(a: int, b: int) -> str:
    """The answer in the form that the system message asks for."""
    return f"{a} + {b} = \\boxed{{{a + b}}}"


def is_held_out(a: int, b: int) -> bool:
    """Whether the sum belongs to validation: about one pair in four."""
    pair = f"{min(a, b)}+{max(a, b)}".encode()
    return hashlib.blake2b(pair, digest_size=8).digest()[0] % 4 == 0


def row(a: int, b: int) -> dict[str, object]:
    """One prompt and its expected answer."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question(*EXAMPLE)},
        {"role": "assistant", "content": worked(*EXAMPLE)},
        {"role": "user", "content": question(a, b)},
    ]
    return {"messages": messages, "expected_answer": str(a + b)}


def write(folder: Path) -> None:
    """`sums/train.jsonl` and `sums/validation.jsonl`, each in a random order."""
    numbers = range(1, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if sorted((a, b)) != sorted(EXAMPLE)]
    random.Random(SEED).shuffle(pairs)
    (folder / "sums").mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        chosen = [pair for pair in pairs if is_held_out(*pair) == (split == "validation")]
        lines = "".join(json.dumps(row(*pair)) + "\n" for pair in chosen)
        (folder / "sums" / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
