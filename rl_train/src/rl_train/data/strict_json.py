"""Strict JSON: rejects texts that a lenient parser would change."""

from __future__ import annotations

import json
import sys
from typing import Any

from rl_core.errors import DataError


def read_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        DataError: It is not valid JSON, or an object has a duplicate key, for which JSON defines no meaning.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"invalid JSON ({error.msg} at {line}column {error.colno})") from error
    except ValueError as error:
        # Python rejects integers of more digits, because the time of the conversion grows with their square.
        raise DataError(
            f"unsupported JSON (it has an integer of more than {sys.get_int_max_str_digits()} digits): write the integer in "
            "quotes, as text"
        ) from error
    except RecursionError as error:
        raise DataError("unsupported JSON (it is nested too deeply)") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} occurs twice in one object: keep one of them")
    return made
