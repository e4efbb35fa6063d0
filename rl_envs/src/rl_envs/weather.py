"""The environment `weather`: the predicted condition must be the observed one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import DataError, format_value

_PREDICTION = re.compile(r"^(?:[^\S\n]|[*_#>-])*+prediction[\s*_]*:(.+)$", re.IGNORECASE | re.MULTILINE)


class WeatherEnvironment(ScorerEnvironment):
    """Rewards 1.0 if the last line `Prediction: ...` of the completion names the expected condition, else 0.0.

    The prompt config `weather/prediction` asks for that line. Case, punctuation and spaces around words do not matter. A row's
    metadata contains `expected_answer`. Metrics: `accuracy`, and `predicted_frac`, the fraction of completions with a
    prediction.

    Args:
        config: an environment section, a dict of its keys, or None for its defaults.
    """

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Score a prediction.

        Raises:
            DataError: the row has no `expected_answer`, or one without letters and digits.
        """
        expected, predicted = _expected(info), _read_prediction(text)
        is_right = _normalized(predicted or "") == _normalized(expected)
        return Score(float(is_right), {"accuracy": is_right, "predicted_frac": predicted is not None}, answer=predicted)


def _read_prediction(text: str) -> str | None:
    matches = _PREDICTION.findall(text)
    return matches[-1].strip(" \t*_.") if matches and matches[-1].strip(" \t*_.") else None


def _expected(info: Mapping[str, Any]) -> str:
    expected = info.get("expected_answer")
    if not isinstance(expected, str) or not _normalized(expected):
        raise DataError(f"the metadata of `weather` needs the text `expected_answer`, found {format_value(info)}.")
    return expected


def _normalized(condition: str) -> str:
    return " ".join(re.findall(r"\w+", condition.casefold()))
