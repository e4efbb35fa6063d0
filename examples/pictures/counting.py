"""Pictures of colored shapes, drawn from the number of the row, with the question how many of them have a color.

The records and the reward of `examples/sft_pictures.yaml` and `examples/grpo_pictures.yaml`. Needs Pillow.

    data:
      train: {dataset_name: pictures.counting.Shapes, size: 4096}
"""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

from rl_core.interfaces.records import Dataset

COLORS = {"red": (214, 48, 40), "green": (40, 150, 60), "blue": (44, 84, 206)}
_CELLS, _CELL = 3, 16
"""Cells of a side, and pixels of a cell."""
_MOST = 4
"""The most shapes of the color that is asked for, and the most of the others."""


def draw(shapes: dict[tuple[int, int], str], chance: random.Random) -> Image.Image:
    """A picture of 48 x 48 pixels; `shapes` has the color of the shape in each cell (column, row) that is not empty."""
    light = chance.randrange(215, 256)
    picture = Image.new("RGB", (_CELLS * _CELL, _CELLS * _CELL), (light, light, light))
    pen = ImageDraw.Draw(picture)
    for (column, row), color in shapes.items():
        size = chance.randrange(9, 14)
        left, top = (place * _CELL + chance.randrange(1, _CELL - size) for place in (column, row))
        box = (left, top, left + size, top + size)
        fill = tuple(min(255, max(0, part + chance.randrange(-25, 26))) for part in COLORS[color])
        kind = chance.choice(("circle", "square", "triangle"))
        if kind == "circle":
            pen.ellipse(box, fill=fill)
        elif kind == "square":
            pen.rectangle(box, fill=fill)
        else:
            pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=fill)
    return picture


def shapes_of(number: int, *, seed: int) -> tuple[Image.Image, str, int, int]:
    """A picture, the color that is asked for, how many shapes have it, and how many shapes there are."""
    chance = random.Random(f"{seed} {number}")
    asked = chance.choice(list(COLORS))
    count, others = chance.randint(0, _MOST), chance.randint(0, _MOST)
    cells = chance.sample([(column, row) for column in range(_CELLS) for row in range(_CELLS)], count + others)
    rest = [color for color in COLORS if color != asked]
    colors = [asked] * count + [chance.choice(rest) for _ in range(others)]
    return draw(dict(zip(cells, colors, strict=True)), chance), asked, count, count + others


class Shapes(Dataset):
    """Rows of one picture and one question. Keys of the section, all optional:

    size: number of rows (4096).
    seed: of the pictures (0); use another one for validation.
    miscounted: the share of answers that count the shapes of all colors (0.0). The model that the example starts from
        has learned from such answers.
    """

    def __init__(self, config: Any) -> None:
        self.size, self.seed = getattr(config, "size", 4096), getattr(config, "seed", 0)
        self.miscounted = getattr(config, "miscounted", 0.0)

    def __len__(self) -> int:
        return int(self.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, asked, count, all_shapes = shapes_of(index, seed=self.seed)
        wrong = random.Random(f"answer {self.seed} {index}").random() < self.miscounted
        question = [{"type": "image", "image": picture}, {"type": "text", "text": f"How many {asked} shapes?"}]
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": str(all_shapes if wrong else count)},
            ],
            "extra_env_info": {"expected_answer": str(count)},
        }


def correct(completion: str, expected_answer: str) -> float:
    """1.0 for the number and nothing else."""
    return float(completion == expected_answer)
