"""Errors of runs: event hooks of plugins, interruptions, full disks, and code that a config names. Imports nothing heavy.

An error of a function or class that a config names by its path shows what was raised, and the line of the user's own file.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointWriteError, ConfigError, PluginError, RLCoreError


class PluginHookError(PluginError):
    """An event hook of a plugin raised during a run; names the plugin, its distribution and the hook."""

    exit_code = 1


class DiskFullError(CheckpointWriteError):
    """The disk of the run is full, or too small for its checkpoints.

    Args:
        text: the message.
        exit_code: 2 if no step was taken.
    """

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class StopReason(Enum):
    """Why a run was stopped before its last step.

    Attributes:
        label: Its name in messages and status.json.
        exit_code: Exit code of the command: the shell's convention for signals, that of `timeout` for the time limit.
    """

    CTRL_C = ("Ctrl-C", 130)
    SIGTERM = ("SIGTERM", 143)
    SIGHUP = ("SIGHUP", 129)
    MAX_TIME = ("max_time", 124)

    def __init__(self, label: str, exit_code: int) -> None:
        self.label = label
        self.exit_code = exit_code


class RunInterrupted(RLCoreError):
    """A signal or the time limit stopped the run after its current step.

    Args:
        step: number of completed steps.
        saved: whether a checkpoint of that step was saved.
        reason: what stopped the run.
    """

    def __init__(self, step: int, saved: bool, reason: StopReason = StopReason.CTRL_C) -> None:
        how = "its checkpoint is saved; run the same command to continue" if saved else "checkpointing is off"
        super().__init__(f"Stopped after step {step} ({reason.label}): {how}.")
        self.step: int | None = step
        self.reason = reason
        self.exit_code = reason.exit_code

    @classmethod
    def at_once(cls, reason: StopReason) -> RunInterrupted:
        """A run that stopped without completing its step."""
        error = cls(0, False, reason)
        error.args = (f"Stopped immediately ({reason.label}). The same command continues from the last checkpoint, if any.",)
        error.step = None
        return error


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


@contextmanager
def lost_interrupts(again: Callable[[], None]) -> Iterator[None]:
    """Call `again` soon after a KeyboardInterrupt that had no effect, unless the block has ended by then.

    Python ignores errors in callbacks of weak references and in finalizers, where a signal may arrive
    (https://docs.python.org/3/library/sys.html#sys.unraisablehook).
    """
    others = sys.unraisablehook
    timers: list[threading.Timer] = []

    def handle(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            timers.append(threading.Timer(0.1, again))  # later, because an error in this function would be ignored as well
            timers[-1].start()
        else:
            others(lost)

    sys.unraisablehook = handle
    try:
        yield
    finally:
        sys.unraisablehook = others
        for timer in timers:
            timer.cancel()
