"""The environment `instruction_following`: checks an answer against the instructions of its row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import DataError, format_value
from rl_envs.instruction_following.config import InstructionFollowingConfig
from rl_envs.instruction_following.constraints import UNSUPPORTED, follows, parameters_of

FOLLOWED_KEY = "followed"
"""Metadata key of the list that says which instructions were followed."""


class InstructionFollowingEnvironment(ScorerEnvironment):
    """Rewards answers that follow the instructions of their row, see `rl_envs.instruction_following.constraints`.

    A row's metadata contains `instruction_id_list`, a list of identifiers, and `kwargs`, a list of their parameters, which may
    be JSON text. `step` adds `followed`, a list of booleans. A row with an instruction that cannot be checked is not scored.
    Metrics: `accuracy`, the fraction of answers that follow all their instructions, and `instruction_accuracy`, the fraction of
    instructions that are followed.

    Args:
        config: `InstructionFollowingConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = InstructionFollowingConfig
    config: InstructionFollowingConfig

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Check an answer.

        Raises:
            DataError: the row has no instructions, or an unknown one, or its parameters are wrong.
        """
        followed = [follows(text, name, parameters) for name, parameters in read_instructions(info)]
        fraction = sum(followed) / max(len(followed), 1)
        return Score(
            fraction if self.config.reward == "fraction" else float(fraction == 1.0),
            {"accuracy": all(followed), "instruction_accuracy": followed},
            metadata={FOLLOWED_KEY: followed},
            scored=set(info["instruction_id_list"]).isdisjoint(UNSUPPORTED),
        )


def read_instructions(info: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The identifiers and parameters of a row's instructions that can be checked.

    Args:
        info: The row's metadata.

    Raises:
        DataError: see `InstructionFollowingEnvironment.score`.
    """
    names = info.get("instruction_id_list")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            "the metadata of `instruction_following` needs `instruction_id_list`, a list of identifiers, and "
            f"`kwargs`, a list of their parameters; found {format_value(info)}. Add both to `env_keys` of the dataset."
        )
    given = _decoded(info.get("kwargs") or [{}] * len(names))
    if not isinstance(given, list) or len(given) != len(names):
        raise DataError(
            f"there are {len(names)} instructions, but `kwargs` is {format_value(given)}: it needs one entry for each."
        )
    read = []
    for name, own in zip(names, given, strict=True):
        parameters = _decoded(own)
        if not isinstance(parameters, Mapping | None):
            raise DataError(f"the entry of `kwargs` for {name} is {format_value(own)}: expected an object.")
        if name not in UNSUPPORTED:
            read.append((name, parameters_of(name, parameters)))
    return read


def _decoded(value: Any) -> Any:
    """A value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"`kwargs` has the text {format_value(value)}, which is invalid JSON: {error}.") from error
