"""Exceptions. Each message states what was found, why it cannot work and what to do. Imports nothing heavy."""

from __future__ import annotations

from enum import Enum


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


class NonFiniteError(RLCoreError):
    """A loss or gradient is NaN or infinite; names the step and the first such tensor."""


class CheckpointWriteError(RLCoreError):
    """A checkpoint could not be written; names the folder, the reason, the last complete checkpoint and what to do."""


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
