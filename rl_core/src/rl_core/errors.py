"""Exceptions. Each message states what was found, why it cannot work and what to do. Imports nothing heavy."""

from __future__ import annotations


class RLCoreError(Exception):
    """An error with an explanation; the command prints it without a traceback.

    Attributes:
        exit_code: 2 for errors in the config or the installation, 1 for failures at run time.
    """

    exit_code = 1


class UserError(RLCoreError):
    """A mistake in the input; nothing was started or lost.

    Attributes:
        key: The dotted config key at fault, if known.
    """

    exit_code = 2
    key: str | None = None


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


class PluginHookError(PluginError):
    """An event hook of a plugin raised during a run; names the plugin, its distribution and the hook."""

    exit_code = 1


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
    """

    group: str = ""


class WorkerDiedError(WorkerError):
    """A worker's process has exited; names the rank, the host and the cause, if known."""


class EngineDiedError(RLCoreError):
    """Raised in a worker if a process that it depends on has exited. The worker is then stopped and counts as dead."""


class RayDiedError(RLCoreError):
    """A Ray daemon exited, so no worker can be reached; names the process and its log."""


class DeadlineExceededError(RLCoreError):
    """A call exceeded its timeout; names the workers that did not answer and what each was doing."""


class WeightSyncError(RLCoreError):
    """The generation backend's weights could not be verified to equal the policy's; the run must not continue."""


class BrokenPromiseError(RLCoreError):
    """A component does not do what its interface promises; names the component, its distribution and the promise."""


class NonFiniteError(RLCoreError):
    """A loss or gradient is NaN or infinite; names the step and the first such tensor."""


class CheckpointWriteError(RLCoreError):
    """A checkpoint could not be written; names the folder, the reason, the last complete checkpoint and what to do."""
