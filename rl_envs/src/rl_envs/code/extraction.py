"""Finds the program in a completion."""

from __future__ import annotations

import re

from rl_core.environments.scorer import final_text

_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def last_code_block(completion: str) -> str | None:
    """The program of a completion: its last fenced block of Python; None if there is none.

    If no block names Python, it is the last block that names no language; such a block after one of Python is usually the
    program's output. A block that is not closed ends with the completion: a cut-off completion is run as far as it
    goes. Blocks inside `<think>` do not count.
    """
    text, position = final_text(completion), 0
    blocks: dict[bool, str] = {}
    while (start := _FENCE.search(text, position)) is not None:
        marks, language = start["marks"], start["language"].lower()
        closing = re.compile(rf"^ {{0,3}}{re.escape(marks[0])}{{{len(marks)},}}[ \t]*$", re.MULTILINE)
        end = closing.search(text, start.end())
        if language in ("", *_PYTHON):
            content = text[start.end() : end.start() if end else len(text)]
            blocks[bool(language)] = _without_indent(content, len(start["indent"])).strip("\n")
        if end is None:
            break
        position = end.end()
    return blocks.get(True, blocks.get(False))


def _without_indent(content: str, width: int) -> str:
    """The content without as many spaces at the start of its lines as its fence has: a block in a list item is indented."""
    return re.sub(rf"^ {{1,{width}}}", "", content, flags=re.MULTILINE) if width else content
