"""Code comments, docstrings, messages, documents and test names avoid the phrases of `banned_phrases.txt`.

`banned_phrases_allowed.txt` has the number of uses that remain in each file; it may only shrink. After removing some, or moving
a file, update it with `python tests/repo/test_plain_english.py`, which fails if a phrase is used more often than before.
"""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PHRASES = FOLDER / "banned_phrases.txt"
ALLOWED = FOLDER / "banned_phrases_allowed.txt"
UPDATE = f"python {Path(__file__).relative_to(ROOT)}"

NOT_CHECKED = re.compile(r"docs/(?:cli|config_reference)\.md|tests/repo/(?:banned_phrases\w*\.txt|test_plain_english\.py)")
"""Pages that are generated from checked sources, and the files of this test."""

_STRING = r'[rRbBfFuU]{0,2}(?:"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
_SOURCE_TEXT = re.compile(rf"(?P<comment>#[^\n]*)|(?P<string>{_STRING})|def (?P<test>test_\w+)", re.DOTALL)
_TOML_TEXT = re.compile(rf"(?P<comment>#[^\n]*)|(?P<string>{_STRING})", re.DOTALL)
_MARKERS = re.compile(r'[#"]')
_EXPRESSION = re.compile(r"\{[^{}\n]*\}")
_IN_WORD = re.compile(r"[\w`]")
"""Before or after a match: part of a longer word, or of an identifier in backticks."""


@dataclass(frozen=True, kw_only=True)
class Phrase:
    pattern: str
    regex: re.Pattern[str]
    suggestion: str


@dataclass(frozen=True, kw_only=True)
class Use:
    path: str
    line: int
    text: str
    phrase: Phrase

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text!r} -> {self.phrase.suggestion}"


def read_phrases(lines):
    rows = [line.split(" => ", 1) for line in lines if line.strip() and not line.startswith("# ")]
    return [Phrase(pattern=pattern, regex=_regex(pattern), suggestion=suggestion) for pattern, suggestion in rows]


def _regex(pattern):
    spaced = pattern.replace(" )", "\x00)").replace(" ", r"\s+").replace("\x00)", r"\s)")
    return re.compile(spaced)


def prose_of(path, content):
    """The text of a file in which code is blanked out; line breaks stay where they are."""
    if not path.endswith((".py", ".toml", ".yaml", ".yml")):
        return content
    in_tests = path.startswith("tests/")
    pieces, end = [], 0
    for found in (_SOURCE_TEXT if path.endswith(".py") else _TOML_TEXT).finditer(content):
        gap = content[end : found.start()]
        # Between the strings of a concatenation and the lines of a comment there is only white space.
        pieces.append(gap if not gap.strip(" \n") else "\x01" + "\n" * gap.count("\n"))
        pieces.append(_text_of(found, in_tests=in_tests))
        end = found.end()
    return "".join(pieces)


def _text_of(found, *, in_tests):
    text = found.group()
    if found["comment"] is not None:
        return _MARKERS.sub(" ", text)
    if found["string"] is None:
        return "\x01" + found["test"].replace("_", " ") + "\x01"
    if in_tests and not text.startswith('"""'):
        return "\x01" + "\n" * text.count("\n")  # a value that a test passes or expects
    if text[0] in "fF":
        text = _EXPRESSION.sub("\x02", text[1:])
    return _MARKERS.sub(" ", text)


def uses_in(path, content, phrases):
    prose = prose_of(path, content)
    lowered = prose.lower()
    for phrase in phrases:
        text = lowered if phrase.pattern.islower() else prose
        for found in phrase.regex.finditer(text):
            start, end = found.span()
            if not (_IN_WORD.match(text, start - 1) if start else None) and not _IN_WORD.match(text, end):
                line = prose.count("\n", 0, start) + 1
                yield Use(path=path, line=line, text=" ".join(prose[start:end].split()), phrase=phrase)


@cache
def all_uses():
    patterns = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.jinja", "*.txt")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    phrases = read_phrases(PHRASES.read_text(encoding="utf-8").splitlines())
    paths = [path for path in listed.stdout.splitlines() if not NOT_CHECKED.fullmatch(path) and (ROOT / path).is_file()]
    return [use for path in paths for use in uses_in(path, (ROOT / path).read_text(encoding="utf-8"), phrases)]


def counts(uses):
    return Counter((use.path, use.phrase.pattern) for use in uses)


def read_allowed():
    allowed = Counter()
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        key, _, count = line.rpartition(": ")
        path, _, pattern = key.partition(": ")
        allowed[path, pattern] = int(count)
    return allowed


def test_no_file_uses_more_banned_phrases_than_allowed():
    allowed = read_allowed()
    found = counts(all_uses())
    grown = [str(use) for use in all_uses() if found[use.path, use.phrase.pattern] > allowed[use.path, use.phrase.pattern]]
    assert grown == [], "\n".join(["Plain English, please; one use of each of these must be reworded:", *grown])


def test_the_list_of_allowed_phrases_has_no_entry_larger_than_its_uses():
    found = counts(all_uses())
    stale = [f"{path}: {pattern}: {count}, found {found[path, pattern]}" for (path, pattern), count in read_allowed().items()]
    stale = [line for line, (key, count) in zip(stale, read_allowed().items(), strict=True) if count > found[key]]
    assert stale == [], "\n".join([f"Fewer uses than allowed. Update the list: {UPDATE}", *stale])


def test_banned_phrases_are_found_in_prose_and_not_in_code():
    content = "\n".join(
        [
            '"""It is',
            'torn."""',
            "torn = beside(torn)  # lies",
            'raise Error(f"{torn} is "',
            '            "torn")',
            "# go",
            "# on",
            "def test_the_pupil(): ...",
        ]
    )
    phrases = read_phrases(["is torn => x", "go(?:es)? on(?! to) => x", "beside => x", "pupils? => x"])
    assert [(use.line, use.text) for use in uses_in("a/b.py", content, phrases)] == [
        (1, "is torn"),
        (4, "is torn"),
        (6, "go on"),
        (8, "pupil"),
    ]


def test_string_literals_of_tests_are_values_and_not_checked():
    assert list(uses_in("tests/test_a.py", 'assert text == "it is torn"', read_phrases(["torn => x"]))) == []


def update():
    """Write the counts of today, unless a phrase is used more often than the list allows."""
    found = counts(all_uses())
    totals = [Counter(), Counter()]
    for total, by_file in zip(totals, (found, read_allowed() if ALLOWED.exists() else found), strict=True):
        for (_, pattern), count in by_file.items():
            total[pattern] += count
    grown = totals[0] - totals[1]
    if grown:
        sys.exit("used more often than allowed: " + ", ".join(f"{pattern} (+{count})" for pattern, count in grown.items()))
    lines = [f"{path}: {pattern}: {count}\n" for (path, pattern), count in sorted(found.items())]
    ALLOWED.write_text("".join(lines), encoding="utf-8")
    print(f"{ALLOWED.relative_to(ROOT)}: {len(lines)} entries, {found.total()} uses")


if __name__ == "__main__":
    update()
