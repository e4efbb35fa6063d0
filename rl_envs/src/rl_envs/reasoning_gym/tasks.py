"""Creates Reasoning Gym datasets, with errors that name what is wrong, and sends problems between processes."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any

from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean

REFUSED = {
    "coin_flip": "its scorer gives the full score to a number that begins as the right one does, such as 0",
    "complex_arithmetic": "its scorer gives the full score to `nan`, and a part of it to every number nearby",
    "composite": "it mixes other tasks. Mix datasets with `data.mix` instead",
    "game_of_life_halting": "its scorer gives the full score to any answer",
    "propositional_logic": "its scorer gives the full score to any conclusion, such as a premise or `(P \u2228 Q)`",
    "puzzle24": "its scorer gives the full score to any four numbers that make 24, such as `6*4*1*1`, whatever the problem",
}
"""Tasks that are not offered, and why: a constant answer gets the full score, so that training would learn it."""


def make_task(task: str, params: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """A dataset of `reasoning_gym` with `ds[i] -> {question, answer, metadata}` and `ds.score_answer(answer, entry)`.

    Args:
        task: name of the task.
        params: its settings.
        seed: random seed of the problems.
        size: number of problems.

    Raises:
        ConfigError: the package is not installed, the task or one of its settings does not exist or is not allowed, or the task
            is one of `REFUSED`.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"Reasoning Gym cannot be imported ({error}): pip install 'rl-envs[reasoning-gym]'.") from error
    if task in REFUSED:
        raise ConfigError(f"`task`: Reasoning Gym's task {task!r} cannot be used: {REFUSED[task]}. Choose another task.")
    if task not in DATASETS:
        raise ConfigError(f"`task`: Reasoning Gym has no task {task!r}.{did_you_mean(task, sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"`params`: Reasoning Gym's task {task!r} does not accept {dict(params)}: {error}") from error


def pickled(value: Any) -> str:
    """A value as text for the other process. Pickled, because JSON would change tuples and keys that are numbers."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")
