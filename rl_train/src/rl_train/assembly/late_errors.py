"""Adds config key, file and line to user errors that are found only while a run starts or trains."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from rl_core.config.diagnostics import InvalidConfigError, Problem
from rl_core.config.source_tree import KeyPath, dotted
from rl_core.errors import UserError, WorkerError
from rl_train.assembly.worker_code_errors import problem_in_user_code
from rl_train.config.loader import LoadedConfig
from rl_train.config.slots import COMPANIONS

_log = logging.getLogger("rlcore")

_QUOTED_KEY = re.compile(r"`([A-Za-z_]\w*(?:\.[\w-]+)*)(?:: [^`]*)?`")
"""How messages name keys: `policy.optimizer.name`, `lr`, or with a value, `head: scalar`."""


@contextmanager
def with_key(key: str) -> Iterator[None]:
    """Adds a config key to user errors of the block that do not have one.

    Args:
        key: Dotted, such as `policy.model_name`.
    """
    try:
        yield
    except UserError as error:
        error.key = error.key or key
        raise


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
        error.locate(loaded.location_of)
        raise
    except WorkerError as error:
        problem = _of_worker(error, loaded) or problem_in_user_code(error, loaded)
        if problem is None:
            raise
        _log.info("%s", error)
        raise InvalidConfigError([problem]) from error
    except UserError as error:
        if error.key is not None:
            path = tuple(error.key.split("."))
            error.args = (str(_located(path, str(error), loaded)),)
            error.key = None
        raise


def _of_worker(error: WorkerError, loaded: LoadedConfig) -> Problem | None:
    """The problem that a worker reported in its section; None if it is not a user error."""
    cause = error.__cause__
    section = _section_of(error.group)
    if not isinstance(cause, UserError) or section is None or loaded.written.at(section) is None:
        return None
    return problem_in_section(cause, section, loaded)


def problem_in_section(error: UserError, section: KeyPath, loaded: LoadedConfig) -> Problem:
    """A user error in a section, at the key that the error or its message names, or at the section itself."""
    path = _in_section(error.key, section) if error.key is not None else _key_in(str(error), section, loaded)
    return _located(path, str(error), loaded)


def _section_of(group: str) -> KeyPath | None:
    """The section that configures a worker group."""
    if group == "generation":
        return ("policy", "generation")
    if group.startswith("env."):
        return ("env", group.removeprefix("env."))
    return (group,) if group in ("policy", *COMPANIONS) else None


def _key_in(message: str, section: KeyPath, loaded: LoadedConfig) -> KeyPath:
    """The first key in a message that its section has; the section itself if there is none."""
    fields = [field.path for field in loaded.layout.fields() if field.path[: len(section)] == section]
    for key in _QUOTED_KEY.findall(message):
        named = _in_section(key, section)[len(section) :]
        for path in sorted(fields, key=len):
            within = path[len(section) :]
            for shared in range(1, min(len(within), len(named)) + 1):
                # In a free mapping, the schema has the field and the rest is a key chosen by the user.
                candidate = (*path, *named[shared:])
                ends_alike = within[-shared:] == named[:shared]
                if ends_alike and (shared == len(named) or loaded.written.at(candidate) is not None):
                    return candidate
    return section


def _in_section(key: str, section: KeyPath) -> KeyPath:
    """The full key. Workers write `policy.` for their own section, also if it is another one."""
    parts = tuple(key.split("."))
    for prefix in (section, ("policy", "generation"), ("policy",)):
        if parts[: len(prefix)] == prefix and len(parts) > len(prefix):
            return (*section, *parts[len(prefix) :])
    return (*section, *parts)


def _located(path: KeyPath, message: str, loaded: LoadedConfig) -> Problem:
    quoted = re.match(r"`[\w.-]+`:? ", message)
    if quoted is not None and quoted.group().strip(":` ").rpartition(".")[2] == str(path[-1]) and ":" in quoted.group():
        message = message[quoted.end() :]
    elif message.startswith(f"{dotted(path)}: "):
        message = message.removeprefix(f"{dotted(path)}: ")
    return Problem(location=loaded.location_of(path), path=path, message=message)
