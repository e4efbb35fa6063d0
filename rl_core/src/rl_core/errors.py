"""What can go wrong, worded once: what was found, why it cannot work, what to do. Imports nothing heavy."""

from __future__ import annotations

from enum import Enum


class RLCoreError(Exception):
    """An error that rlcore explains; the command prints it without a traceback.

    Attributes:
        exit_code: 2 for what the user can mend in the config or the installation, 1 for what broke at run time.
    """

    exit_code = 1


class UserError(RLCoreError):
    """A mistake in the input: nothing was started and nothing was lost.

    Attributes:
        key: The dotted config key that is to blame, where whoever raised or caught the error knows it.
    """

    exit_code = 2
    key: str | None = None


class ConfigError(UserError):
    """The config cannot be honoured; the text lists every place, one a line."""


class PluginError(UserError):
    """A component was asked for that no working plugin provides."""


class InvalidComponentError(PluginError):
    """A `Component` does not have the form that it states: names the field and what it held."""


class UnknownComponentError(PluginError):
    """No plugin registers this name: names those that there are and the nearest one."""


class ComponentNotInstalledError(PluginError):
    """A distribution that rlcore knows would provide it: names the command that installs it."""


class BrokenPluginError(PluginError):
    """A plugin is installed and does not work, or is disabled: names the distribution, its version and the reason."""


class DuplicateComponentError(PluginError):
    """Several plugins register one name: names them and how to disable one."""


class WrongKindError(PluginError):
    """The name is of another kind of component, or its target lacks the interface of its kind."""


class MissingCapabilityError(PluginError):
    """The component exists and cannot do what this run needs of it."""


class ComponentImportError(PluginError):
    """The target or config model of a component cannot be imported; carries the original exception."""


class PluginHookError(PluginError):
    """An event hook of a plugin raised during a run: names the plugin, its distribution and the hook."""

    exit_code = 1


class DataError(UserError):
    """A row, a file or a batch does not have the form that its reader states."""


class ResourceInsufficientError(UserError):
    """The cluster has too few nodes, CPUs or GPUs: what was asked, what there is, what to change."""


class CheckpointError(UserError):
    """A checkpoint is absent, torn, or of another model or config."""


class NotSupportedError(UserError):
    """The chosen backend does not do what was asked of it."""


class WorkerError(RLCoreError):
    """A worker raised: names the rank, the host, the method, and carries the original traceback.

    Attributes:
        group: Name of the worker group, such as `policy`, `value`, `generation` or `env.math`; empty if unknown.
    """

    group: str = ""


class WorkerDiedError(WorkerError):
    """A worker's process is gone: names the rank, the host and what is known of its end."""


class EngineDiedError(RLCoreError):
    """Raised in a worker: a process that it depends on is gone. Its own is then ended and counts as dead."""


class RayDiedError(RLCoreError):
    """A daemon of Ray died, so that no worker can be reached: names the process and its log."""


class DeadlineExceededError(RLCoreError):
    """A call outlived its deadline: names who did not answer and what each was doing."""


class WeightSyncError(RLCoreError):
    """The generation backend's weights are not proven to be the policy's; the run must not go on."""


class NonFiniteError(RLCoreError):
    """A loss or gradient is NaN or infinite: names the step and the first offender."""


class CheckpointWriteError(RLCoreError):
    """A checkpoint could not be written: names the folder, the reason, the last complete checkpoint and what to do."""


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
    """Why a run was asked to stop before its last step.

    Attributes:
        label: As messages and status.json name it.
        exit_code: Of the command: as shells have it for signals, and as `timeout` has it for the time limit.
    """

    CTRL_C = ("Ctrl-C", 130)
    SIGTERM = ("SIGTERM", 143)
    SIGHUP = ("SIGHUP", 129)
    MAX_TIME = ("max_time", 124)

    def __init__(self, label: str, exit_code: int) -> None:
        self.label = label
        self.exit_code = exit_code


class RunInterrupted(RLCoreError):
    """The run was asked to stop, and finished the step under way first.

    Args:
        step: steps done.
        saved: whether a checkpoint of that step was written.
        reason: who asked.
    """

    def __init__(self, step: int, saved: bool, reason: StopReason = StopReason.CTRL_C) -> None:
        how = "its checkpoint is written; the same command goes on from there" if saved else "checkpointing is off"
        super().__init__(f"Stopped after step {step} ({reason.label}): {how}.")
        self.step: int | None = step
        self.reason = reason
        self.exit_code = reason.exit_code

    @classmethod
    def at_once(cls, reason: StopReason) -> RunInterrupted:
        """The run did not finish its step."""
        error = cls(0, False, reason)
        error.args = (f"Stopped at once ({reason.label}). The same command goes on from the last checkpoint, if there is one.",)
        error.step = None
        return error
