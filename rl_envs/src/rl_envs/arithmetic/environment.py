"""The environment `arithmetic`: reward 1.0 if the completion is the expected whole number, compared as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import DataError
from rl_envs.config import ArithmeticEnvironmentConfig
from rl_envs.math.boxes import last_box

_NUMBER = re.compile(r"-?[0-9]+")


class ArithmeticEnvironment(ScorerEnvironment):
    r"""Checks the answers to `ArithmeticDataset`.

    In the plain style, a completion is correct if it is exactly the number, ignoring surrounding white space: `046`, `+46` and
    `46 or 47` are wrong if `46` is expected. In the chat style (`in_box` in the row's metadata), the last `\boxed{}` must
    contain exactly the number. Metrics: `accuracy`, and `number_frac`, the fraction of answers that are whole numbers.

    Args:
        config: `ArithmeticEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = ArithmeticEnvironmentConfig
    config: ArithmeticEnvironmentConfig

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """1.0 if correct, plus `format_reward` if the answer is a whole number, correct or not.

        Raises:
            DataError: The row's metadata has no `expected_answer`.
        """
        if "expected_answer" not in info:
            raise DataError(
                f"the metadata has no 'expected_answer': found {info!r}. Records of the dataset `arithmetic` have it."
            )
        answer = read_number(text, in_box=bool(info.get("in_box")))
        is_right = answer == str(info["expected_answer"])
        return Score(
            float(is_right) + self.config.format_reward * (answer is not None),
            {"accuracy": is_right, "number_frac": answer is not None},
            answer=answer,
            reply="correct" if is_right else "incorrect",
        )


def read_number(text: str, *, in_box: bool) -> str | None:
    """The whole number that an answer (or its last box) consists of, as written; None for anything else."""
    written = last_box(text) if in_box else text
    number = _NUMBER.fullmatch(written.strip()) if written is not None else None
    return None if number is None else number.group()
