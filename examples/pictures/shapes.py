"""Pictures of two shapes, drawn from the number of the row, with a question about the color of one of them.

The records and the reward of `examples/sft_pictures.yaml` and `examples/grpo_pictures.yaml`. Needs Pillow.

    data:
      train: {dataset_name: pictures.shapes.TwoShapes, size: 4096}
"""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

from rl_core.interfaces.records import Dataset

COLORS = {"red": (214, 48, 40), "green": (40, 150, 60), "blue": (44, 84, 206), "yellow": (240, 205, 50), "black": (35, 35, 35)}
DARK_TO_LIGHT = ("black", "blue", "green", "red", "yellow")
SIDES = ("left", "right")
_CELL = 16
"""Pixels of a cell; a picture has 3 x 3."""


def draw(colors: list[str], chance: random.Random) -> Image.Image:
    """A picture of 48 x 48 pixels: a shape of the first color in the left column, and one of the second in the right."""
    light = chance.randrange(215, 256)
    picture = Image.new("RGB", (3 * _CELL, 3 * _CELL), (light, light, light))
    pen = ImageDraw.Draw(picture)
    for column, color in zip((0, 2), colors, strict=True):
        size = chance.randrange(9, 14)
        left, top = (cell * _CELL + chance.randrange(1, _CELL - size) for cell in (column, chance.randrange(3)))
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


def shapes_of(number: int, *, seed: int) -> tuple[Image.Image, list[str], int]:
    """A picture, the colors of its shapes from left to right, and the index of the shape that the question is about."""
    chance = random.Random(f"{seed} {number}")
    colors = chance.sample(list(COLORS), 2)
    return draw(colors, chance), colors, chance.randrange(2)


class TwoShapes(Dataset):
    """Rows of one picture and one question. Keys of the section, all optional:

    size: number of rows (4096).
    seed: of the pictures (0); use another one for validation.
    darker: whether the question is about the darker shape, instead of the left or the right one (False).
    mixed_up: the share of answers that are the color of the other shape (0.0). The model that the example starts from has
        learned from such answers.
    """

    def __init__(self, config: Any) -> None:
        self.size, self.seed = getattr(config, "size", 4096), getattr(config, "seed", 0)
        self.darker, self.mixed_up = getattr(config, "darker", False), getattr(config, "mixed_up", 0.0)

    def __len__(self) -> int:
        return int(self.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, colors, asked = shapes_of(index, seed=self.seed)
        wrong = random.Random(f"answer {self.seed} {index}").random() < self.mixed_up
        if self.darker:
            asked = min((0, 1), key=lambda shape: DARK_TO_LIGHT.index(colors[shape]))
        text = f"What color is the {'darker' if self.darker else SIDES[asked]} shape?"
        return {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]},
                {"role": "assistant", "content": colors[1 - asked if wrong else asked]},
            ],
            "extra_env_info": {"expected_answer": colors[asked]},
        }


def correct(completion: str, expected_answer: str) -> float:
    """1.0 for the color and nothing else."""
    return float(completion == expected_answer)
