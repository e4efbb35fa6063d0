"""The weather example: the last prediction counts, in any spelling."""

import pytest

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_envs.weather import WeatherEnvironment


def test_the_last_prediction_of_the_completion_must_be_the_expected_condition():
    answers = {
        "Low pressure.\nPrediction: light rain": 1.0,
        "**Prediction:** Light  rain.": 1.0,
        "prediction: sun\nPrediction: light-rain": 1.0,
        "Prediction: light rain\nPrediction: sun": 0.0,
        "light rain": 0.0,
        "Prediction:": 0.0,
        "My prediction: light rain": 0.0,
    }
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in answers]
    environment = WeatherEnvironment()
    made = environment.step(logs, [{"expected_answer": "Light rain"}] * len(logs))
    assert made.rewards.tolist() == list(answers.values())
    assert made.answers[0] == "light rain"
    batch = BatchedDataDict({"rewards": made.rewards, "answers": made.answers, "extra_env_info": made.metadata})
    assert environment.global_post_process_and_metrics(batch)[1] == {
        "accuracy": pytest.approx(3 / 7),
        "predicted_frac": pytest.approx(4 / 7),
    }


def test_a_row_without_an_expected_answer_is_refused():
    with pytest.raises(DataError, match="needs the text `expected_answer`"):
        WeatherEnvironment().step([[{"role": "assistant", "content": "x"}]], [{}])


@pytest.mark.parametrize("empty", ["", " ", "?!"])
def test_an_expected_answer_without_words_is_refused_because_a_missing_prediction_would_equal_it(empty):
    logs = [[{"role": "assistant", "content": "no prediction"}]] * 2
    with pytest.raises(DataError, match="Row 1: "):
        WeatherEnvironment().step(logs, [{"expected_answer": "sun"}, {"expected_answer": empty}])
