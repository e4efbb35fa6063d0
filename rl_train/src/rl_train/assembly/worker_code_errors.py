"""Errors that the user's own classes raise in a worker: what was raised, and the line of the user's file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.diagnostics import Problem
from rl_core.config.source_tree import KeyPath
from rl_core.errors import ConfigError, PluginError, RLCoreError, WorkerError, frames_of
from rl_core.plugins.component import is_path
from rl_train.config.loader import LoadedConfig

_OF_RESOURCES = ("OutOfMemoryError", "MemoryError")
"""Errors whose cause is not the line that raised them."""


def problem_in_user_code(error: WorkerError, loaded: LoadedConfig) -> Problem | None:
    """The line of the config's own loss or environment class that raised in a worker; None if none of them did.

    Args:
        error: raised by a worker that uses the class.
        loaded: names the classes.
    """
    if isinstance(error.__cause__, RLCoreError):
        return None
    for section, component in loaded.components.items():
        at = tuple(section.split("."))
        runs_elsewhere = at[0] == "env" and loaded.run.env[at[-1]].python is not None
        if runs_elsewhere or not is_path(component.name) or not _uses(error.group, at):
            continue
        try:
            found = plain_class(component.load())
        except PluginError:
            continue
        if (message := _raised_in(error, found, component.name)) is not None:
            path = _key_of(at, loaded)
            return Problem(location=loaded.location_of(path), path=path, message=message)
    return None


@contextmanager
def reporting_lines(found: type) -> Iterator[None]:
    """Reports an exception that the code of a class raised in the block, here or in a worker, with its file and line.

    Raises:
        ConfigError: the class raised.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__ if isinstance(error, WorkerError) else error, RLCoreError):
            raise
        message = _raised_in(error, found, f"{found.__module__}.{found.__qualname__}")
        if message is None:
            raise
        raise ConfigError(message) from error


def _raised_in(error: Exception, found: Any, name: str) -> str | None:
    """What was raised, with the last line in the file of a class; None if no frame is in that file."""
    try:
        file = inspect.getsourcefile(found)
    except (TypeError, OSError):
        return None
    if isinstance(error, WorkerError):
        frames, raised = error.frames, error.raised
    else:
        frames, raised = frames_of(error), f"{type(error).__name__}: {error}"
    lines = [line for path, line in frames if path == file]
    kind, _, text = raised.partition(":")
    if not lines or kind.startswith(_OF_RESOURCES) or kind.endswith(_OF_RESOURCES):
        return None
    return f"{name} raised {kind} at {file}:{lines[-1]}:{text}"


def _uses(group: str, at: KeyPath) -> bool:
    """Whether workers of a group run the code of a section: models that of the loss, environments their own."""
    if at == ("loss_fn",):
        return group in ("policy", "value")
    return at[0] == "env" and group == ".".join(map(str, at))


def _key_of(section: KeyPath, loaded: LoadedConfig) -> KeyPath:
    """The key that names the class."""
    keys = ((*section, key) for key in ("env_cls", "name"))
    return next((key for key in keys if loaded.written.at(key) is not None), section)
