"""Exceptions. Each message states what was found, why it cannot work and what to do. Imports nothing heavy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RLCoreError(Exception):
    """An error with an explanation; the command prints it without a traceback.

    Attributes:
        exit_code: 2 for errors in the config or the installation, 1 for failures at run time.
    """

    exit_code = 1


class UserError(RLCoreError):
    """A mistake in the input; nothing was started or lost.

    Args:
        args: The text.
        key: The dotted config key at fault, if known: in full (`policy.optimizer.name`), or relative to the section of the
            component that raises (`timeout_s`). A run adds its file and line to the text.
    """

    exit_code = 2

    def __init__(self, *args: object, key: str | None = None) -> None:
        super().__init__(*args)
        self.key = key


class ConfigError(UserError):
    """The config is invalid; the text lists every problem, one per line."""


class PluginError(UserError):
    """No working plugin provides the requested component."""


class InvalidComponentError(PluginError):
    """A field of a `Component` is invalid; names the field and its value."""


class UnknownComponentError(PluginError):
    """No plugin registers this name; lists the existing ones and suggests the nearest."""


class ComponentNotInstalledError(PluginError):
    """A known distribution would provide it; names the command that installs it."""


class BrokenPluginError(PluginError):
    """A plugin is installed but broken or disabled; names the distribution, its version and the reason."""


class DuplicateComponentError(PluginError):
    """Several plugins register one name; names them and how to disable one."""


class WrongKindError(PluginError):
    """The component is of another kind, or its target does not implement the interface of its kind."""


class MissingCapabilityError(PluginError):
    """The component lacks a capability that the run needs."""


class ComponentImportError(PluginError):
    """The target or config model of a component cannot be imported; chained to the original exception."""


class DataError(UserError):
    """A row, a file or a batch does not have the required form."""


class ResourceInsufficientError(UserError):
    """The cluster has too few nodes, CPUs or GPUs; names what was requested, what is available and what to change."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or of another model or config."""


class NotSupportedError(UserError):
    """The chosen backend does not support the request."""


class WorkerError(RLCoreError):
    """A worker raised; names the rank, the host and the method, and includes the original traceback.

    Attributes:
        group: Name of the worker group, such as `policy`, `value`, `generation` or `env.math`; empty if unknown.
        raised: Type and message of the original exception, such as `ValueError: too small`; empty if unknown.
        frames: File and line of each frame of the original exception, the innermost last.
    """

    group: str = ""
    raised: str = ""
    frames: tuple[tuple[str, int], ...] = ()


class WorkerDiedError(WorkerError):
    """A worker's process has exited; names the rank, the host and the cause, if known."""


class EngineDiedError(RLCoreError):
    """Raised in a worker if a process that it depends on has exited. The worker is then stopped and counts as dead."""


class RayDiedError(RLCoreError):
    """A Ray daemon exited or did not start, so no worker can be reached; names the process and its log."""


class DeadlineExceededError(RLCoreError):
    """A call exceeded its timeout; names the workers that did not answer and what each was doing."""


class WeightSyncError(RLCoreError):
    """The generation backend's weights could not be verified to equal the policy's; the run must not continue."""


class TransportDeclinedError(WeightSyncError):
    """The engine cannot receive weights by this transport, such as by reference if it has merged tensors: the next is tried."""


class BrokenPromiseError(RLCoreError):
    """A component does not do what its interface promises; names the component, its distribution and the promise."""


class NonFiniteError(RLCoreError):
    """A loss or gradient is NaN or infinite; names the step and the first such tensor."""


class CheckpointWriteError(RLCoreError):
    """A checkpoint could not be written; names the folder, the reason, the last complete checkpoint and what to do."""


def declined_transport(error: BaseException | None) -> TransportDeclinedError | None:
    """The error of an engine that declines a transport, if it is this error or a cause of it."""
    while error is not None and not isinstance(error, TransportDeclinedError):
        error = error.__cause__
    return error


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


def frames_of(error: BaseException) -> tuple[tuple[str, int], ...]:
    """File and line of each frame of an exception, the innermost last; those of its cause come first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    own = tuple((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    return own if cause is None else (*frames_of(cause), *own)


_LONGEST = 120


def format_value(value: Any) -> str:
    """The value as text, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
