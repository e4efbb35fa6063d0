"""Adds config key, file and line to user errors that are found only while a run starts or trains.

For errors that the user's own classes raise in a worker, that is what was raised, and the line of the user's file.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.diagnostics import InvalidConfigError, KeyPath, Problem, dotted, in_order_of_files
from rl_core.errors import ConfigError, PluginError, RLCoreError, UserError, WorkerError, frames_of
from rl_core.plugins.component import is_path
from rl_train.config.loader import LoadedConfig, LocatedConfig
from rl_train.config.slots import COMPANIONS

_log = logging.getLogger("rlcore")
_OF_RESOURCES = ("OutOfMemoryError", "MemoryError")
"""Errors whose cause is not the line that raised them."""


@contextmanager
def with_location(loaded: LoadedConfig) -> Iterator[None]:
    """Adds file, line and key to user errors of the block, whether from the driver or a worker.

    Raises:
        InvalidConfigError: A worker reported a user error; the message is unchanged, without rank and method. Or a class that
            the config names by its path raised in a worker; the message has file and line.
        UserError: The driver reported one; the type is unchanged.
    """
    try:
        yield
    except InvalidConfigError as error:
        problems = [replace(each, location=each.location or loaded.location_of(each.path)) for each in error.problems]
        error.problems = tuple(sorted(problems, key=in_order_of_files))
        error.args = ("\n".join(str(problem) for problem in error.problems),)
        raise
    except WorkerError as error:
        problem = _of_worker(error, loaded) or problem_in_user_code(error, loaded)
        if problem is None:
            raise
        _log.info("%s", error)
        raise InvalidConfigError([problem]) from error
    except UserError as error:
        if error.key is not None:
            error.args = (str(_located(error, tuple(error.key.split(".")), loaded)),)
            error.key = None
        raise


def _of_worker(error: WorkerError, loaded: LoadedConfig) -> Problem | None:
    """The problem that a worker reported in its section; None if it is not a user error."""
    cause = error.__cause__
    section = _section_of(error.group)
    if not isinstance(cause, UserError) or section is None or loaded.written.at(section) is None:
        return None
    return problem_in_section(cause, section, loaded)


def problem_in_section(error: UserError, section: KeyPath, loaded: LocatedConfig) -> Problem:
    """A user error in a section, at the error's key, or at the section itself."""
    path = section if error.key is None else _in_section(error.key, section, loaded)
    return _located(error, path, loaded)


def _section_of(group: str) -> KeyPath | None:
    """The section that configures a worker group."""
    if group == "generation":
        return ("policy", "generation")
    section, _, task = group.partition(".")
    if section in ("env", "teachers") and task:
        return (section, task)
    return (group,) if group in ("policy", *COMPANIONS) else None


def _in_section(key: str, section: KeyPath, loaded: LocatedConfig) -> KeyPath:
    """The full key; the section itself if it has no such key.

    Workers write `policy.` for their own section, even if it is another one, and may leave out leading components.
    """
    named = _relative(key, section)
    fields = [field.path for field in loaded.layout.fields() if field.path[: len(section)] == section]
    for path in sorted(fields, key=len):
        within = path[len(section) :]
        for shared in range(1, min(len(within), len(named)) + 1):
            # In a free mapping, the schema has the field and the rest is a key chosen by the user.
            candidate = (*path, *named[shared:])
            ends_alike = within[-shared:] == named[:shared]
            if ends_alike and (shared == len(named) or loaded.written.at(candidate) is not None):
                return candidate
    return (*section, *named) if loaded.written.at((*section, *named)) is not None else section


def _relative(key: str, section: KeyPath) -> KeyPath:
    parts = tuple(key.split("."))
    for prefix in (section, ("policy", "generation"), ("policy",)):
        if parts[: len(prefix)] == prefix and len(parts) > len(prefix):
            return parts[len(prefix) :]
    return parts


def _located(error: UserError, path: KeyPath, loaded: LocatedConfig) -> Problem:
    """The problem at a key; its message does not repeat the key."""
    # In a message, a key starts with `policy.` even if the section is another one.
    names = [dotted(path[start:]) for start in range(len(path))] + [dotted(("policy", *path[1:]))]
    prefixes = [f"{dotted(path)}: ", *(f"`{name}`: " for name in names)]
    message = str(error)
    repeated = next((prefix for prefix in prefixes if message.startswith(prefix)), "")
    return Problem(location=loaded.location_of(path), path=path, message=message.removeprefix(repeated))


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
