"""Differences between the config of a checkpoint and the current one, and which of them a resume allows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError
from rl_train.config.dotted_keys import leaves

FREE_TO_CHANGE = (
    "logger.",
    "checkpointing.",
    "cluster.",
    "data.validation.",
    "data.validation_sets.",
    "data.val_data_path",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "value.train_micro_batch_size",
    "value.logprob_batch_size",
    "policy.generation.max_restarts",
    "policy.generation.val_temperature",
    "rollout.retries",
    "rollout.max_failed_share",
    "policy.generation.refit_canary",
    "policy.generation.canary_tolerance",
)
"""Prefixes of config keys that a resume may change without confirmation: how or how long a run continues, not what it is."""

FREE_IN_ALGORITHM = ("max_num_steps", "max_num_epochs", "max_val_samples", "val_")
"""The same, within the algorithm's section."""

FIXED = {
    "policy.optimizer.name": "the state of one optimizer cannot be loaded into another",
    "value.optimizer.name": "the state of one optimizer cannot be loaded into another",
}
"""Keys that no resume can change, and why."""


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], algorithm: str) -> dict[str, tuple[Any, Any]]:
    """Changed keys that need confirmation, with their old and new values; None for a missing key."""
    free = (*FREE_TO_CHANGE, *(f"{algorithm}.{key}" for key in FREE_IN_ALGORITHM))
    before, after = ({key: value for key, value in leaves(config) if value != {}} for config in (old, new))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(free)
    }


def refuse_changes(
    checkpoint: Path, old: Mapping[str, Any], new: Mapping[str, Any], algorithm: str, *, allow: bool
) -> dict[str, tuple[Any, Any]]:
    """The changes of a resume, if they are allowed.

    Args:
        checkpoint: the step folder.
        old: the config of the checkpoint.
        new: the current config.
        algorithm: the section of the current algorithm.
        allow: whether the user allowed changes.

    Raises:
        CheckpointError: there are changes that are not allowed, or that a resume cannot make.
    """
    if algorithm not in old:
        raise CheckpointError(
            f"{checkpoint} was written by an algorithm other than {algorithm}, so it cannot be resumed. "
            f"Start a new run from its weights: --resume never policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    changes = config_changes(old, new, algorithm)
    if fixed := [key for key in changes if key in FIXED]:
        raise CheckpointError(
            f"{checkpoint} was written with another config:\n{describe({key: changes[key] for key in fixed})}\n"
            f"A resume cannot change {', '.join(fixed)}: {FIXED[fixed[0]]}. Undo the change, or start a new run from the "
            f"weights: --resume never policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    if changes and not allow:
        raise CheckpointError(
            f"{checkpoint} was written with another config:\n{describe(changes)}\n"
            "Continue with the new config by --allow-config-change, start a new run with --resume never, or undo the changes."
        )
    return changes


def describe(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """One line per change."""
    return "\n".join(f"  {key}: {_format(old)} then, {_format(new)} now" for key, (old, new) in changes.items())


def _format(value: Any) -> str:
    return "absent" if value is None else repr(value)
