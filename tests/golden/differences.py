"""Differences between what two checkouts have written, each at a place (file, line) and with a key."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

MEASURED = re.compile(r"(_s|_ms|_gib|_mib|idle_frac|mfu|seconds)$")
"""Ends of the keys of times, speeds and memory."""
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """One value that differs, or a key, row or file that only one checkout has."""

    place: str
    key: str
    old: str
    new: str

    def __str__(self):
        return f"{self.place}: {self.key}: {shortened(self.old)} -> {shortened(self.new)}"


def shortened(text):
    return text if len(text) <= 200 else f"{text[:197]}..."


def compare_values(place, old, new, *, ignored=MEASURED, key=""):
    """The differences between two values of JSON, by dotted key; keys that match `ignored` are left out."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = f"{key}.{name}" if key else name
            if not ignored.search(inner):
                yield from compare_values(place, old.get(name, ABSENT), new.get(name, ABSENT), ignored=ignored, key=inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from compare_values(place, left, right, ignored=ignored, key=f"{key}[{at}]")
    elif type(old) is not type(new) or (old != new and not (old != old and new != new)):
        yield Difference(place, key, text_of(old), text_of(new))


def compare_rows(name, old, new, *, ignored=MEASURED):
    """The differences between the lines of two files of JSON Lines, in their order."""
    old, new = ([json.loads(line) for line in text.splitlines()] for text in (old, new))
    for number, (left, right) in enumerate(zip(old, new, strict=False), 1):
        yield from compare_values(f"{name}:{number}", left, right, ignored=ignored)
    if len(old) != len(new):
        yield Difference(f"{name}:{min(len(old), len(new)) + 1}", "rows", str(len(old)), str(len(new)))


def compare_sets(name, old, new, *, ignored=MEASURED, columns=None):
    """The rows that only one of two texts of JSON Lines has, as often as it has them; of `columns` only, if given."""
    left, right = (Counter(canonical_rows(text, ignored, columns)) for text in (old, new))
    yield from (Difference(name, "rows", row, ABSENT) for row in (left - right).elements())
    yield from (Difference(name, "rows", ABSENT, row) for row in (right - left).elements())


def canonical_rows(text, ignored, columns):
    for row in map(json.loads, text.splitlines()):
        kept = {key: value for key, value in row.items() if not ignored.search(key) and (columns is None or key in columns)}
        yield json.dumps(kept, sort_keys=True)


def compare_texts(name, old, new):
    """The first line that differs between two texts, and the number of lines."""
    old, new = old.splitlines(), new.splitlines()
    for number, (left, right) in enumerate(zip(old, new, strict=False), 1):
        if left != right:
            yield Difference(f"{name}:{number}", "text", left, right)
            return
    if len(old) != len(new):
        yield Difference(f"{name}:{min(len(old), len(new)) + 1}", "lines", str(len(old)), str(len(new)))


def text_of(value):
    return value if value is ABSENT else json.dumps(value)


def unexpected(case, differences, allowed):
    """The differences that no pattern `case:key` names; `*` in a pattern stands for any text."""
    patterns = [key for name, key in (pattern.split(":", 1) for pattern in allowed) if fnmatchcase(case, name)]
    return [each for each in differences if not any(fnmatchcase(each.key, key) for key in patterns)]
