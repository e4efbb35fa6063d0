"""The environment `instruction_following`: checks an answer against the instructions of its row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
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
        instructions = [read_instructions(info) for info in metadata]
        checked = [
            [follows(str(log[-1]["content"]), name, parameters) for name, parameters in row]
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


def read_instructions(info: Any) -> list[tuple[str, dict[str, Any]]]:
    """The identifiers and parameters of a row's instructions that can be checked.

    Raises:
        DataError: see `InstructionFollowingEnvironment.step`.
    """
    if (
        not isinstance(info, Mapping)
        or not isinstance(info.get("instruction_id_list"), list)
        or not info["instruction_id_list"]
    ):
        raise DataError(
            "The metadata of a row of `instruction_following` needs `instruction_id_list`, a list of identifiers, and "
            f"`kwargs`, a list of their parameters; found {_shown(info)}. Add both to `env_keys` of the dataset."
        )
    names = info["instruction_id_list"]
    given = info.get("kwargs") or [{}] * len(names)
    given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) != len(names):
        raise DataError(
            f"A row has {len(names)} instructions, but its `kwargs` are {_shown(given)}: one entry for each is needed."
        )
    each = [json.loads(parameters) if isinstance(parameters, str) else parameters for parameters in given]
    return [(name, parameters_of(name, own)) for name, own in zip(names, each, strict=True) if name not in UNSUPPORTED]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
