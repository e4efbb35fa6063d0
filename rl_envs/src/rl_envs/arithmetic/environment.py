"""The environment `arithmetic`: reward 1.0 if the completion is the expected whole number, compared as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.completions import final_text
from rl_envs.config import ArithmeticEnvironmentConfig, read_section
from rl_envs.math.boxes import last_box
from rl_envs.single_turn import correctness_replies, ended

_NUMBER = re.compile(r"-?[0-9]+")


class ArithmeticEnvironment(EnvironmentInterface):
    r"""Checks the answers to `ArithmeticDataset`.

    In the plain style, a completion is correct if it is exactly the number, ignoring surrounding white space: `046`, `+46` and
    `46 or 47` are wrong if `46` is expected. In the chat style (`in_box` in the row's metadata), the last `\boxed{}` must
    contain exactly the number.

    Args:
        config: `ArithmeticEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: ArithmeticEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(ArithmeticEnvironmentConfig, config)

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Score B conversations by their last message; every row ends.

        Returns:
            Rewards [B] float32: 1.0 if correct, plus `format_reward` if the answer is a whole number, correct or not.

        Raises:
            DataError: A row's metadata has no `expected_answer`.
        """
        answers = [
            read_number(log[-1]["content"], in_box=bool(_field(info, "in_box", default=False)))
            for log, info in zip(message_log_batch, metadata, strict=True)
        ]
        correct = [answer == str(_field(info, "expected_answer")) for answer, info in zip(answers, metadata, strict=True)]
        rewards = [
            float(is_right) + self.config.format_reward * (answer is not None)
            for is_right, answer in zip(correct, answers, strict=True)
        ]
        return ended(
            rewards,
            [{**info, "right": is_right} for info, is_right in zip(metadata, correct, strict=True)],
            replies=correctness_replies(correct),
            answers=answers,
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`, and `number_frac` if the batch has the `answers` of `step`."""
        states = batch["extra_env_info"]
        metrics: dict[str, float | int] = {"accuracy": sum(state["right"] for state in states) / len(states)}
        if "answers" in batch:
            metrics["number_frac"] = sum(answer is not None for answer in batch["answers"]) / len(batch["answers"])
        return batch, metrics


def read_number(completion: str, *, in_box: bool) -> str | None:
    """The whole number that the answer (or its last box) consists of, as written; None for anything else."""
    text = final_text(completion)
    if in_box:
        box = last_box(text)
        if box is None:
            return None
        text = box
    number = _NUMBER.fullmatch(text.strip())
    return None if number is None else number.group()


def _field(info: Any, name: str, *, default: Any = None) -> Any:
    if not isinstance(info, Mapping) or (name not in info and default is None):
        raise DataError(f"A row's metadata has no {name!r}: found {info!r}. Records of the dataset `arithmetic` have it.")
    return info.get(name, default)
