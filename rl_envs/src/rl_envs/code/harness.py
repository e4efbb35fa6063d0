"""The program that runs inside the sandbox: the completion's code, then the tests, then the observed values as text."""

from __future__ import annotations

import ast
import re
import secrets

from rl_envs.code.assertions import SplitTests
from rl_envs.code.evaluation import Observation

# Values are written as Python literals by functions of the base types, so that a subclass cannot choose its text.
_HARNESS = """
import itertools, os, sys, types

def __text(value):
    kind = type(value)
    if value is None or kind is bool:
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
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

def __observe__(number, *parts, items=()):
    texts = []
    for index, part in enumerate(parts):
        try:
            value = part()
            texts.append("(False, " + __text(__items(value) if index in items else value) + ")")
        except Exception:
            texts.append("(True, None)")
    sys.stdout.flush()
    os.write(1, ("\\n" + @nonce@ + " " + str(number) + " [" + ", ".join(texts) + "]\\n").encode())

solution = sys.modules["solution"] = types.ModuleType("solution")
namespace = solution.__dict__
exec(compile(@code@, "solution.py", "exec"), namespace)
namespace["__observe__"] = __observe__
failure = None
for number, statement in enumerate(@statements@):
    try:
        exec(compile(statement, "test %d" % number, "exec"), namespace)
    except Exception as error:
        failure = failure or error
if failure is not None:
    raise failure
"""
_MOST_ITEMS = 100_000
LONGEST_LINE = 1 << 20
"""Longest line with observations that is read, in characters."""


def harness(code: str, tests: SplitTests) -> tuple[str, str]:
    """The program to run, and the mark of its lines with observations.

    The mark keeps the program's own output apart. It is not secret: a program that finds it can only write other values, and it
    would have to know the expected ones.
    """
    nonce = f"observed-{secrets.token_hex(8)}"
    values = {"nonce": nonce, "code": code, "statements": tests.statements, "most": _MOST_ITEMS}
    return re.sub("@(nonce|code|statements|most)@", lambda found: repr(values[found[1]]), _HARNESS), nonce


def read_observations(stdout: str, nonce: str) -> dict[int, list[list[Observation]]]:
    """The observations that a program printed, by number of the assertion, in order. Lines that are not valid are ignored."""
    found: dict[int, list[list[Observation]]] = {}
    for line in stdout.splitlines():
        if not line.startswith(nonce + " ") or len(line) > LONGEST_LINE:
            continue
        number, _, text = line.removeprefix(nonce + " ").partition(" ")
        try:
            values = ast.literal_eval(text)
            observations = [Observation(bool(raised), value) for raised, value in values]
            found.setdefault(int(number), []).append(observations)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return found
