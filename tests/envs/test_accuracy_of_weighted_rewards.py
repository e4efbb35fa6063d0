"""Accuracy counts correct answers, whatever weight `reward_weights` gives to the reward."""

import pytest

from rl_core.testing.outputs.environment import metrics_checked
from rl_envs.arithmetic import ArithmeticEnvironment
from rl_envs.guess import GuessNumberEnvironment
from rl_envs.math.environment import MathEnvironment
from rl_envs.sliding_puzzle import SlidingPuzzleEnvironment
from rl_envs.tools.environment import ToolsEnvironment
from rl_envs.weather import WeatherEnvironment


@pytest.mark.parametrize("weight", [0.1, -1.0, 10.0])
@pytest.mark.parametrize(
    ("environment_class", "right", "wrong", "metadata"),
    [
        (MathEnvironment, r"\boxed{4}", r"\boxed{5}", {"expected_answer": "4"}),
        (ToolsEnvironment, r"\boxed{4}", r"\boxed{5}", {"expected_answer": "4"}),
        (ArithmeticEnvironment, "4", "5", {"expected_answer": "4"}),
        (WeatherEnvironment, "Prediction: rain", "Prediction: sun", {"expected_answer": "rain"}),
        (GuessNumberEnvironment, "4", "5", {"secret": 4}),
        (SlidingPuzzleEnvironment, "3", "1", {"board": [[1, 2], [0, 3]]}),
    ],
)
def test_accuracy_does_not_depend_on_the_weight_of_the_reward(environment_class, right, wrong, metadata, weight):
    environment = environment_class()
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in (right, wrong, wrong, wrong)]
    made = environment.step(logs, [metadata] * 4)
    rewards = made.rewards["solved"] if isinstance(made.rewards, dict) else made.rewards
    batch = {"rewards": weight * rewards, "answers": made.answers, "extra_env_info": made.metadata, "message_log": logs}
    assert metrics_checked(environment, "task", batch)["accuracy"] == 0.25
    environment.shutdown()
