"""The files of a policy's training state: reads them without executing anything, and explains damaged or unwritten files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import CheckpointError, CheckpointWriteError

DAMAGE_ERRORS: Final = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)
"""What torch and Megatron raise for damaged files."""
TRAINER_FILE: Final = "trainer.pt"
"""File of rank 0 with the weight version, the schedule and the format number."""


def read_trainer_file(folder: Path, *, expected_format: int) -> dict[str, Any]:
    """The content of `trainer.pt`.

    Raises:
        CheckpointError: the file is missing or damaged, or has another format number.
    """
    values = read_state_file(folder / TRAINER_FILE)
    if values.get("format") != expected_format:
        raise CheckpointError(
            f"{folder} has format {values.get('format')}, but this rlcore reads {expected_format}: use the one that wrote it."
        )
    return values


def read_state_file(path: Path) -> dict[str, Any]:
    """A mapping that `torch.save` wrote; nothing in the file is executed.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        state: Any = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: there is no training state to resume from.") from error
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(f"{path} is damaged: {reason_of(error)}. Use another checkpoint.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it contains {type(state).__name__}, not a mapping. Use another checkpoint.")
    return dict(state)


def reason_of(error: BaseException) -> str:
    """The type and text of an error of torch, without tracebacks of ranks or advice to load files that can run code."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {reason_of(reason)}" for rank, (reason, _) in error.failures.items())
    if "`weights_only`" in str(error):
        return "it contains objects other than tensors and plain data, which could run code"
    return f"{type(error).__name__}: {error}"


def write_error(folder: Path, error: CheckpointException) -> CheckpointWriteError | KeyboardInterrupt:
    """The error for a training state that torch could not write; an interruption, which torch converts too, is unchanged."""
    for reason, _ in error.failures.values():
        if isinstance(reason, KeyboardInterrupt):
            return reason
    return CheckpointWriteError(f"The training state could not be written to {folder}: {reason_of(error)}")
