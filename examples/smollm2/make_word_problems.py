"""Writes word problems as conversations and preference pairs. The output is deterministic.

    python examples/smollm2/make_word_problems.py examples/smollm2

An answer has one sentence with the sum and one with the result. This is the chosen answer of a pair; the rejected answer has
the same format with a wrong result, or the correct result in another format. Held-out problems are not in the training data.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

TRAIN, VALIDATION, SEED = 200, 64, 0
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Emma", "Finn", "Grace", "Hugo", "Ida", "Jon", "Kira", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pens", "shells", "stamps", "stickers")
STORIES = (
    ("+", "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?"),
    ("+", "There are {a} {things} in one box and {b} in another. {name} puts them together. How many {things} are there?"),
    ("-", "{name} has {a} {things} and gives {b} of them away. How many {things} are left?"),
    ("-", "{name} needs {a} {things} and has {b}. How many {things} are missing?"),
)


def problems(rng: random.Random) -> Iterator[tuple[str, str, int, str]]:
    """Yields question, sum, result and things of distinct problems, without end."""
    seen = set()
    while True:
        operation, story = rng.choice(STORIES)
        a, b = sorted((rng.randint(2, 20), rng.randint(2, 20)), reverse=True)
        things = rng.choice(THINGS)
        question = story.format(name=rng.choice(NAMES), a=a, b=b, things=things)
        result = a + b if operation == "+" else a - b
        if question not in seen and result > 0:
            seen.add(question)
            yield question, f"{a} {operation} {b}", result, things


def answer(expression: str, result: int, things: str) -> str:
    """The answer in the format to learn."""
    return f"{expression} = {result}, so there are {result} {things}. The answer is {result}."


def rejected(rng: random.Random, expression: str, result: int, things: str) -> str:
    """A rejected answer: a wrong result in this format, or the correct result in another."""
    wrong = result + rng.choice([step for step in (-3, -2, -1, 1, 2, 3, 10) if result + step > 0])
    return rng.choice([answer(expression, wrong, things), f"{result}", f"Let us see. I think it must be {result} {things}."])


def write(folder: Path) -> None:
    """`conversations` and `preferences`, each with a training and a validation file."""
    rng = random.Random(SEED)
    unending = problems(rng)
    for split, rows in (("train", TRAIN), ("validation", VALIDATION)):
        conversations, preferences = [], []
        for question, expression, result, things in (next(unending) for _ in range(rows)):
            said = answer(expression, result, things)
            conversations.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]})
            preferences.append({"prompt": question, "chosen": said, "rejected": rejected(rng, expression, result, things)})
        for kind, made in (("conversations", conversations), ("preferences", preferences)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in made)
            (folder / kind / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
