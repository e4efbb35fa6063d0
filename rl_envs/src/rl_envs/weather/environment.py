"""The environment `weather`: the predicted condition must be the observed one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.formatting import format_value
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.completions import final_text
from rl_envs.config import read_section
from rl_envs.single_turn import ended

_PREDICTION = re.compile(r"^(?:[^\S\n]|[*_#>-])*+prediction[\s*_]*:(.+)$", re.IGNORECASE | re.MULTILINE)


class WeatherEnvironment(EnvironmentInterface):
    """Rewards 1.0 if the last line `Prediction: ...` of the completion names the expected condition, else 0.0.

    The prompt config `weather/prediction` asks for that line. Case, punctuation and spaces around words do not matter. A row's
    metadata contains `expected_answer`.

    Args:
        config: an environment section, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: EnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(EnvironmentConfig, config)

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Score B predictions; `answers` has each predicted condition, or None if there is no prediction.

        Raises:
            DataError: a row has no `expected_answer`, or one without letters and digits.
        """
        predicted = [_read_prediction(final_text(str(log[-1]["content"]))) for log in message_log_batch]
        correct = list(map(_is_right, range(len(predicted)), predicted, metadata))
        return ended([float(each) for each in correct], metadata, answers=predicted)

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`, and `predicted_frac`: the fraction of completions with a prediction."""
        answers, states = batch["answers"], batch["extra_env_info"]
        return batch, {
            "accuracy": sum(map(_is_right, range(len(answers)), answers, states)) / len(answers),
            "predicted_frac": sum(answer is not None for answer in answers) / len(answers),
        }


def _read_prediction(text: str) -> str | None:
    matches = _PREDICTION.findall(text)
    return matches[-1].strip(" \t*_.") if matches and matches[-1].strip(" \t*_.") else None


def _is_right(row: int, answer: str | None, info: Any) -> bool:
    return _normalized(answer or "") == _normalized(_expected(row, info))


def _expected(row: int, info: Any) -> str:
    expected = info.get("expected_answer") if isinstance(info, Mapping) else None
    if not isinstance(expected, str) or not _normalized(expected):
        raise DataError(f"Row {row}: the metadata of `weather` needs the text `expected_answer`, found {format_value(info)}.")
    return expected


def _normalized(condition: str) -> str:
    return " ".join(re.findall(r"\w+", condition.casefold()))
