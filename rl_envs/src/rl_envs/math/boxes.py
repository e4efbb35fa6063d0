r"""Finds the last `\boxed{...}` in a completion. Lightweight imports only."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def last_box(completion: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`; the innermost if boxes are nested, None if there is none.

    Runs in linear time for any input.
    """
    span: tuple[int, int] | None = None
    open_braces: list[tuple[bool, int]] = []
    for token in _TOKEN.finditer(completion):
        text = token.group()
        if text == "}" and open_braces:
            is_box, start = open_braces.pop()
            holds_a_box = span is not None and span[0] > start
            if is_box and not holds_a_box:
                span = (start, token.start())
        elif text[-1] == "{" and text != "\\{":
            open_braces.append((text != "{", token.end()))
    return None if span is None else completion[span[0] : span[1]].strip()
