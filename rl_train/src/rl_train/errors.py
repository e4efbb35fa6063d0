"""Exceptions of runs: event hooks of plugins, interruptions and full disks. Imports nothing heavy."""

from __future__ import annotations

from enum import Enum

from rl_core.errors import CheckpointWriteError, PluginError, RLCoreError


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
