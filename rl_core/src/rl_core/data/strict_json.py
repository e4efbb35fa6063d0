"""Texts of JSON, read so that nothing in them is lost; knows no file and no field."""

from __future__ import annotations

import json
import sys
from typing import Any

from rl_core.errors import DataError


def read_json(text: str) -> Any:
    """What a text of JSON says.

    Raises:
        DataError: It is no JSON, or an object in it has a key twice: JSON leaves open which of the two counts.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"no JSON ({error.msg} at {line}column {error.colno})") from error
    except ValueError as error:
        # Python converts no text of more digits to an integer, since the time for it grows with their square.
        raise DataError(
            f"no JSON that can be read (it has an integer of more than {sys.get_int_max_str_digits()} digits): write it in "
            "quotes, as text"
        ) from error
    except RecursionError as error:
        raise DataError("no JSON that can be read (it is nested too deeply)") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} is there twice in one object: keep the one that is meant")
    return made
