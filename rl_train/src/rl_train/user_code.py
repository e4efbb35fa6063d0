"""Errors of functions and classes that a config names by their path: what was raised, and the line of the user's own file."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, RLCoreError

_OUR_FOLDER = Path(__file__).parent


def describe_raised(error: BaseException, code: Any) -> str:
    """What was raised, and where: `KeyError at /home/me/my_rewards.py:12: 'level'`.

    Args:
        error: the exception, with its traceback.
        code: the function, class or object that was called. The line is the last one in its file, even if the error was raised
            in a library that it calls. It is left out if the call itself failed, such as one with wrong arguments.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = _file_of(code)
    frame = next((each for each in reversed(frames) if each.filename == file), frames[-1])
    is_call = frame.filename != file and _OUR_FOLDER in Path(frame.filename).parents
    location = "" if is_call else f" at {frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}{location}: {error}"


@contextmanager
def reporting_errors(label: str, code: Any) -> Iterator[None]:
    """Reports exceptions of the block, except for rlcore's own errors, as mistakes in the user's code.

    Args:
        label: names the code and the call in the error.
        code: the function, class or object that is called.

    Raises:
        ConfigError: the code raised.
    """
    try:
        yield
    except RLCoreError:
        raise
    except Exception as error:
        raise ConfigError(f"{label} raised {describe_raised(error, code)}") from error


def _file_of(code: Any) -> str | None:
    function = inspect.unwrap(code) if callable(code) else code
    if hasattr(function, "__code__"):
        return str(function.__code__.co_filename)
    try:
        return inspect.getsourcefile(code if inspect.isclass(code) else type(code))
    except (TypeError, OSError):
        return None
