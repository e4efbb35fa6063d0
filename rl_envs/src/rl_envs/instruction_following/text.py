"""Counts and units of text: words, sentences, paragraphs and list items."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_WORD = re.compile(r"\w+(?:['’.,-]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|$)")
_BEFORE_NAMES = frozenset(("mr", "mrs", "ms", "dr", "prof", "e.g", "i.e", "vs", "cf"))
"""Abbreviations that never end a sentence."""
_ANYWHERE = frozenset(("etc", "inc", "ltd", "co", "jr", "sr", "dept", "approx", "a.m", "p.m", "u.s"))
"""Abbreviations that end a sentence only before a capital letter."""
_WRAPPED = re.compile(r"(?<![.!?…:\s])[ \t]*\n(?=[a-z])")
_BULLET = re.compile(r"^[^\S\n]*(?:[*+•-])\s+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<![*\w])(\*{1,2})(?!\s|\*)([^*\n]+?)(?<!\s)\1(?![*\w])")


def words(text: str) -> list[str]:
    """The words of a text; "don't", "well-known" and "3.5" are one word each."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences of a text, which end at `.`, `!` or `?` before white space, or with their line.

    Abbreviations such as "e.g.", initials and the numbers of list items do not end a sentence. A line that continues in
    small letters is part of the same sentence.
    """
    pieces = []
    for line in _WRAPPED.sub(" ", text).splitlines():
        start = 0
        for end in _SENTENCE_END.finditer(line):
            if not _is_abbreviation(line[start : end.start()], end.group(), line[end.end() :].lstrip()):
                pieces.append(line[start : end.end()])
                start = end.end()
        pieces.append(line[start:])
    return [sentence.strip() for sentence in pieces if words(sentence)]


def paragraphs(text: str, *, separator: str = r"\n\s*\n") -> list[str]:
    """The parts of a text between separators (a regular expression) that are not blank."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def bullets(text: str) -> int:
    """Number of list items that start with `*`, `-`, `+` or a bullet character; a rule such as `***` is not an item."""
    return len(_BULLET.findall(text))


def highlights(text: str) -> int:
    """Number of sections in Markdown emphasis, `*one*` or `**one**`, that are not empty."""
    return len(_HIGHLIGHT.findall(text))


def count_phrase(text: str, phrase: str) -> int:
    """How often a phrase occurs as whole words, ignoring case and the kind of white space."""
    pieces = [re.escape(piece) for piece in phrase.split()]
    pattern = r"(?<![^\W_])" + r"\s+".join(pieces) + r"(?![^\W_])"  # `_word_` is a word in italics
    return len(re.findall(pattern, text, re.IGNORECASE)) if pieces else 0


def capital_words(text: str) -> list[str]:
    """The words in which all letters are capitals, and which have at least one letter."""
    return [word for word in words(text) if word.isupper()]


def compare(count: int, relation: str, threshold: int) -> bool:
    """Whether a count is in a relation to a threshold: `at least`, `less than`, `at most`, `more than` or `exactly`."""
    return RELATIONS[relation](count, threshold)


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, threshold: count >= threshold,
    "less than": lambda count, threshold: count < threshold,
    "at most": lambda count, threshold: count <= threshold,
    "more than": lambda count, threshold: count > threshold,
    "exactly": lambda count, threshold: count == threshold,
}
"""Relations by their names in the data."""


def joined(items: Sequence[str]) -> str:
    """Items of a list in a sentence: `"a", "b" and "c"`."""
    quoted = [f'"{item}"' for item in items]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _is_abbreviation(before: str, mark: str, after: str) -> bool:
    """Whether the mark after a text belongs to an abbreviation, an initial or the number of a list item."""
    if not after or not before.strip() or mark.rstrip("\"'”’)]*_") != ".":
        return False
    last = before.split()[-1].lstrip("(\"'“‘[*_")
    is_initial = len(last) == 1 and last.isupper() and last != "I"
    is_item = before.strip() == last and last.isdigit()
    before_small = last.casefold() in _ANYWHERE and not after[0].isupper()
    return last.casefold() in _BEFORE_NAMES or is_initial or is_item or before_small
