"""The program that runs inside the sandbox: the completion's code, then the tests, then the observed values as text."""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_envs.code.assertions import SplitTests
from rl_envs.code.evaluation import Observation

# Values are written as Python literals by functions of the base types, so that a subclass cannot choose its text.
_HARNESS = """
import itertools, os, sys, types

def __text(value, hexadecimal=hex):
    kind = type(value)
    if value is None or kind is bool:
        return repr(value)
    if isinstance(value, int):
        return hexadecimal(value) if value.bit_length() > @most_bits@ else int.__repr__(value)
    if isinstance(value, float):
        if value != value:
            raise TypeError("not a number")
        return float.__repr__(value).replace("inf", "1e999")
    for base in (complex, str, bytes):
        if isinstance(value, base):
            return base.__repr__(value)
    if isinstance(value, list):
        return "[" + ", ".join([__text(item) for item in value]) + "]"
    if isinstance(value, tuple):
        return "(" + "".join([__text(item) + ", " for item in value]) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join([__text(item) for item in value]) + "}" if value else "set()"
    if isinstance(value, dict):
        return "{" + ", ".join([__text(key) + ": " + __text(item) for key, item in value.items()]) + "}"
    if hasattr(value, "tolist"):
        return __text(value.tolist())
    raise TypeError("not a plain value: " + kind.__name__)

def __items(value):
    if isinstance(value, (str, bytes, list, tuple, set, frozenset, dict)) or hasattr(value, "tolist"):
        return value
    items = list(itertools.islice(value, @most@ + 1))
    if len(items) > @most@:
        raise TypeError("too many items")
    return items

def __write(text, write=os.write):
    sys.stdout.flush()
    write(1, ("\\n" + @nonce@ + " " + text + "\\n").encode())

def __observe__(number, *parts, items=()):
    texts = []
    for index, part in enumerate(parts):
        try:
            value = part()
            texts.append("(False, " + __text(__items(value) if index in items else value) + ")")
        except Exception:
            texts.append("(True, None)")
    __write(str(number) + " [" + ", ".join(texts) + "]")

class __Names(dict):
    def __missing__(self, name):
        return namespace[name]

solution = sys.modules["solution"] = types.ModuleType("solution")
namespace = solution.__dict__
exec(compile(@code@, "solution.py", "exec"), namespace)
names, failure = __Names(__name__="tests", __observe__=__observe__), None
for number, (statement, definitions) in enumerate(@statements@):
    try:
        exec(compile(statement, "test %d" % number, "exec"), names)
        for name in definitions:
            namespace.setdefault(name, names[name])
        __write("finished %d" % number)
    except Exception as error:
        failure = failure or error
if failure is not None:
    raise failure
"""
_MOST_ITEMS = 100_000
_MOST_BITS = 10_000
"""Larger whole numbers are written in hexadecimal digits: Python refuses to convert more than 4,300 decimal digits."""
LONGEST_LINE = 1 << 20
"""Longest line with observations that is read, in characters."""


def harness(code: str, tests: SplitTests) -> tuple[str, str]:
    """The program to run, and the random prefix of its lines with observed values.

    The prefix keeps the program's own output apart. It is not secret: a program that finds it could report wrong values, but
    would have to know the expected ones.
    """
    nonce = f"observed-{secrets.token_hex(8)}"
    statements = tuple(zip(tests.statements, tests.definitions, strict=True))
    values = {"nonce": nonce, "code": code, "statements": statements, "most": _MOST_ITEMS, "most_bits": _MOST_BITS}
    return re.sub("@(nonce|code|statements|most|most_bits)@", lambda found: repr(values[found[1]]), _HARNESS), nonce


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a program with its tests reported.

    Attributes:
        observations: By number of the assertion, one entry each time it ran, in order.
        finished: Numbers of the statements of the tests that ran to their end.
    """

    observations: Mapping[int, Sequence[Sequence[Observation]]]
    finished: frozenset[int]


def read_report(stdout: str, nonce: str) -> Report:
    """Read the report from the program's output. Lines that are not valid are ignored."""
    found: dict[int, list[list[Observation]]] = {}
    finished = set()
    for line in stdout.split("\n"):
        if not line.startswith(nonce + " ") or len(line) > LONGEST_LINE:
            continue
        number, _, text = line.removeprefix(nonce + " ").partition(" ")
        try:
            if number == "finished":
                finished.add(int(text))
                continue
            values = ast.literal_eval(text)
            observations = [Observation(bool(raised), value) for raised, value in values]
            found.setdefault(int(number), []).append(observations)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return Report(observations=found, finished=frozenset(finished))
