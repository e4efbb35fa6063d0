"""Errors that the user's own classes raise in a worker: what was raised, and the line of the user's file."""

from __future__ import annotations

import inspect
import re
import traceback
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.diagnostics import Problem
from rl_core.config.source_tree import KeyPath
from rl_core.errors import ConfigError, PluginError, RLCoreError, WorkerError
from rl_core.plugins.component import is_path
from rl_train.config.loader import LoadedConfig

_TRACEBACK = "\n--- its traceback ---\n"
"""Separates the headline of a worker's error from its traceback."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)
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
        if not is_path(component.name) or not _uses(error.group, at):
            continue
        try:
            file = inspect.getsourcefile(plain_class(component.load()))
        except (PluginError, TypeError, OSError):
            continue
        lines = [line for found, line in _frames(error) if found == file]
        raised = _raised(error)
        if lines and not raised.startswith(_OF_RESOURCES) and not raised.partition(":")[0].endswith(_OF_RESOURCES):
            path = _key_of(at, loaded)
            what = f"{component.name} raised {raised.partition(':')[0]} at {file}:{lines[-1]}:{raised.partition(':')[2]}"
            return Problem(location=loaded.location_of(path), path=path, message=what)
    return None


def check_environment_class(worker_class: Any, name: str) -> None:
    """Check that a class has a method `step`.

    Raises:
        ConfigError: it has none, so no turn of a rollout could be answered.
    """
    found = plain_class(worker_class)
    abstract = sorted(getattr(found, "__abstractmethods__", ()))
    missing = abstract or ([] if callable(getattr(found, "step", None)) else ["step"])
    if not missing:
        return
    try:
        location = f" ({inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]})"
    except (TypeError, OSError):
        location = ""
    raise ConfigError(
        f"The environment {name}{location} has no method {' and no method '.join(missing)}. Define "
        "`step(self, message_log_batch, metadata)`, which returns an EnvironmentReturn."
    )


def _uses(group: str, at: KeyPath) -> bool:
    """Whether workers of a group run the code of a section: models that of the loss, environments their own."""
    if at == ("loss_fn",):
        return group in ("policy", "value")
    return at[0] == "env" and group == ".".join(map(str, at))


def _key_of(section: KeyPath, loaded: LoadedConfig) -> KeyPath:
    """The key that names the class."""
    keys = ((*section, key) for key in ("env_cls", "name"))
    return next((key for key in keys if loaded.written.at(key) is not None), section)


def _frames(error: WorkerError) -> list[tuple[str, int]]:
    """File and line of each frame, from the traceback of the exception or, from another process, from its text."""
    text = str(error).partition(_TRACEBACK)[2]
    if text:
        return [(found["file"], int(found["line"])) for found in _FRAME.finditer(text)]
    cause = error.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    return [(frame.filename, frame.lineno or 0) for frame in frames]


def _raised(error: WorkerError) -> str:
    """Type and message of the exception."""
    if error.__cause__ is not None:
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    return str(error).rstrip().rpartition("\n")[2]
