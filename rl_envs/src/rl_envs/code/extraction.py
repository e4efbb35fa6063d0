"""Finds the program in a completion."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)[^\n`]*$", re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")


def last_code_block(completion: str) -> str | None:
    """The content of the last fenced block that is Python or names no language; None if there is none.

    A block that is not closed ends with the completion: a completion that was cut off is then run as far as it goes.
    """
    found, position = None, 0
    while (start := _FENCE.search(completion, position)) is not None:
        marks = start["marks"]
        closing = re.compile(rf"^ {{0,3}}{re.escape(marks[0])}{{{len(marks)},}}[ \t]*$", re.MULTILINE)
        end = closing.search(completion, start.end())
        if start["language"].lower() in _LANGUAGES:
            found = completion[start.end() : end.start() if end else len(completion)].strip("\n")
        if end is None:
            break
        position = end.end()
    return found
