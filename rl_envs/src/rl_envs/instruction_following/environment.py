"""The environment `instruction_following`: checks an answer against the instructions of its row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.formatting import format_value
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.completions import final_text
from rl_envs.config import read_section
from rl_envs.instruction_following.config import InstructionFollowingConfig
from rl_envs.instruction_following.constraints import UNSUPPORTED, follows, parameters_of
from rl_envs.single_turn import ended

FOLLOWED_KEY = "followed"
"""Metadata key of the list that says which instructions were followed."""


class InstructionFollowingEnvironment(EnvironmentInterface):
    """Rewards answers that follow the instructions of their row, see `rl_envs.instruction_following.constraints`.

    A row's metadata contains `instruction_id_list`, a list of identifiers, and `kwargs`, a list of their parameters, which may
    be JSON text. `step` adds `followed`, a list of booleans. A row with an instruction that cannot be checked is not scored.

    Args:
        config: `InstructionFollowingConfig`, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: InstructionFollowingConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(InstructionFollowingConfig, config)

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Check B answers.

        Raises:
            DataError: a row has no instructions, or an unknown one, or its parameters are wrong.
        """
        instructions = [read_instructions(row, info) for row, info in enumerate(metadata)]
        checked = [
            [follows(final_text(str(log[-1]["content"])), name, parameters) for name, parameters in row]
            for log, row in zip(message_log_batch, instructions, strict=True)
        ]
        fractions = [sum(row) / max(len(row), 1) for row in checked]
        return ended(
            fractions if self.config.reward == "fraction" else [float(fraction == 1.0) for fraction in fractions],
            [{**info, FOLLOWED_KEY: row} for info, row in zip(metadata, checked, strict=True)],
            scored=[set(info["instruction_id_list"]).isdisjoint(UNSUPPORTED) for info in metadata],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of answers that follow all their instructions; `instruction_accuracy`: of all instructions."""
        followed = [info[FOLLOWED_KEY] for info in batch["extra_env_info"]]
        every = [each for row in followed for each in row]
        return batch, {
            "accuracy": sum(all(row) for row in followed) / len(followed),
            "instruction_accuracy": sum(every) / max(len(every), 1),
        }


def read_instructions(row: int, info: Any) -> list[tuple[str, dict[str, Any]]]:
    """The identifiers and parameters of a row's instructions that can be checked.

    Args:
        row: Index of the row, for errors.
        info: Its metadata.

    Raises:
        DataError: see `InstructionFollowingEnvironment.step`.
    """
    names = info.get("instruction_id_list") if isinstance(info, Mapping) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"Row {row}: the metadata of `instruction_following` needs `instruction_id_list`, a list of identifiers, and "
            f"`kwargs`, a list of their parameters; found {format_value(info)}. Add both to `env_keys` of the dataset."
        )
    given = _decoded(row, info.get("kwargs") or [{}] * len(names))
    if not isinstance(given, list) or len(given) != len(names):
        raise DataError(
            f"Row {row} has {len(names)} instructions, but its `kwargs` are {format_value(given)}: it needs one entry for each."
        )
    read = []
    for name, own in zip(names, given, strict=True):
        parameters = _decoded(row, own)
        if not isinstance(parameters, Mapping | None):
            raise DataError(f"Row {row}: the entry of `kwargs` for {name} is {format_value(own)}: expected an object.")
        if name not in UNSUPPORTED:
            read.append((name, _parameters(row, name, parameters)))
    return read


def _parameters(row: int, name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return parameters_of(name, given)
    except DataError as error:
        raise DataError(f"Row {row}: {error}") from error


def _decoded(row: int, value: Any) -> Any:
    """A value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"Row {row}: `kwargs` has the text {format_value(value)}, which is invalid JSON: {error}.") from error
