r"""Finds the last `\boxed{...}` in a completion. Lightweight imports only."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    r"""A closed `\boxed{...}` or `\fbox{...}` without another one inside."""

    start: int
    end: int
    """Index of the character after its closing brace."""
    content: str


def last_box(completion: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`; the innermost if boxes are nested, None if there is none.

    Runs in linear time for any input.
    """
    boxes = closed_boxes(completion)
    return boxes[-1].content if boxes else None


def closed_boxes(completion: str) -> list[Box]:
    """All innermost closed boxes in their order, in linear time."""
    boxes: list[Box] = []
    open_braces: list[tuple[bool, int, int]] = []
    for token in _TOKEN.finditer(completion):
        text = token.group()
        if text == "}" and open_braces:
            is_box, start, inside = open_braces.pop()
            if is_box and not (boxes and boxes[-1].start > start):
                boxes.append(Box(start, token.end(), completion[inside : token.start()].strip()))
        elif text[-1] == "{" and text != "\\{":
            open_braces.append((text != "{", token.start(), token.end()))
    return boxes
