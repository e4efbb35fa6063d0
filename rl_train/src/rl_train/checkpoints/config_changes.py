"""Differences between the config of a checkpoint and the current one, and which of them a resume allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.introspection import NO_DEFAULT
from rl_core.config.source_tree import KeyPath, dotted
from rl_core.errors import CheckpointError
from rl_train.checkpoints.inputs import ROWS, Inputs, input_changes
from rl_train.config.dotted_keys import leaves_by_path
from rl_train.config.slots import is_named_by_user

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
_FIXED_ROWS = "the order of the data cannot continue with other rows: some would be seen twice and others never"


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Defaults of the keys of a config.

    Attributes:
        of: the default of a key; `NO_DEFAULT` if it has none.
        by_device: keys that were null and stand for a value that depends on the devices.
    """

    of: Callable[[KeyPath], Any] = lambda _: NO_DEFAULT
    by_device: Collection[KeyPath] = ()


UNKNOWN_DEFAULTS = Defaults()
"""Defaults for a config whose sections are not known."""


def config_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    algorithm: str,
    *,
    defaults: Defaults = UNKNOWN_DEFAULTS,
    inputs: tuple[Inputs, Inputs] = ({}, {}),
) -> dict[str, tuple[Any, Any]]:
    """Changed keys that need confirmation, with their old and new values; None for a missing key.

    A key that was added to a section since the checkpoint was written is not a change if it has its default, because the run of
    the checkpoint behaved like that. Nor is a null that replaces a fixed default because the value now depends on the devices,
    nor another path of the same content.

    Args:
        old: the config of the checkpoint.
        new: the current config.
        algorithm: the section of the current algorithm.
        defaults: those of the current config.
        inputs: those of the checkpoint and of the current config.
    """
    free = (*FREE_TO_CHANGE, *(f"{algorithm}.{key}" for key in FREE_IN_ALGORITHM))
    before, after = ({path: value for path, value in leaves_by_path(config) if path and value != {}} for config in (old, new))
    same = {path for path in after.keys() - before.keys() if after[path] == defaults.of(path) and _is_new_key(path, old)}
    same |= {path for path in defaults.by_device if path not in before or after.get(path) is None}
    moved = {key for key, content in inputs[0].items() if inputs[1].get(key) == content}
    return {
        dotted(path): (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys(), key=dotted)
        if path not in same
        and before.get(path) != after.get(path)
        and dotted(path) not in moved
        and not dotted(path).startswith(free)
    }


def described_changes(changes: Mapping[str, tuple[Any, Any]], inputs: tuple[Inputs, Inputs]) -> str:
    """One line per change of the config, from `config_changes`, or of its inputs."""
    # What a new value refers to is not compared with the old one, unless they have something in common.
    of_inputs = {
        key: words
        for key, words in input_changes(*inputs).items()
        if key not in changes or inputs[0][key].keys() & inputs[1][key].keys()
    }
    return "\n".join([*([describe(changes)] if changes else []), *(f"  {key}: {words}" for key, words in of_inputs.items())])


def _is_new_key(path: KeyPath, old: Mapping[str, Any]) -> bool:
    """Whether the section of a key existed in an old config, without this key or a section that contains it.

    An entry that the user named, such as an environment, is not a new key, and a section that was null is a change.
    """
    section: Any = old
    for length, key in enumerate(path):
        if not isinstance(section, Mapping):
            return False
        if key not in section:
            return not any(is_named_by_user(path[:count]) for count in range(length + 1, len(path)))
        section = section[key]
    return False


def refuse_changes(
    checkpoint: Path,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    algorithm: str,
    *,
    allow: bool,
    defaults: Defaults = UNKNOWN_DEFAULTS,
    inputs: tuple[Inputs, Inputs] = ({}, {}),
) -> None:
    """Refuse a resume with changes that are not allowed.

    Args:
        checkpoint: the step folder.
        old: the config of the checkpoint.
        new: the current config.
        algorithm: the section of the current algorithm.
        allow: whether the user allowed changes.
        defaults: those of the current config.
        inputs: those of the checkpoint and of the current config.

    Raises:
        CheckpointError: there are changes that are not allowed, or that a resume cannot make.
    """
    if algorithm not in old:
        raise CheckpointError(
            f"{checkpoint} was written by an algorithm other than {algorithm}, so it cannot be resumed. "
            f"Start a new run from its weights: --resume never policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    changes = config_changes(old, new, algorithm, defaults=defaults, inputs=inputs)
    fixed = {key: FIXED[key] for key in changes if key in FIXED}
    data = sorted(inputs[0].keys() & inputs[1].keys())
    fixed |= {key: _FIXED_ROWS for key in data if inputs[0][key].get(ROWS) != inputs[1][key].get(ROWS)}
    described = described_changes(changes, inputs)
    if fixed:
        raise CheckpointError(
            f"{checkpoint} was written with another config:\n{described}\n"
            f"A resume cannot change {', '.join(fixed)}: {next(iter(fixed.values()))}. Undo the change, or start a new run "
            f"from the weights: --resume never policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    if described and not allow:
        raise CheckpointError(
            f"{checkpoint} was written with another config:\n{described}\n"
            "Continue with the new config by --allow-config-change, start a new run with --resume never, or undo the changes."
        )


def describe(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """One line per change."""
    return "\n".join(f"  {key}: {_format(old)} then, {_format(new)} now" for key, (old, new) in changes.items())


def _format(value: Any) -> str:
    return "absent" if value is None else repr(value)
