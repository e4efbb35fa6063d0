"""Environments score what follows the last `</think>`, and a completion that ended while thinking has no answer."""

from __future__ import annotations

import pytest

from rl_core.environments.scorer import final_text
from rl_envs.arithmetic import ArithmeticEnvironment
from rl_envs.guess import GuessNumberEnvironment
from rl_envs.instruction_following import InstructionFollowingEnvironment
from rl_envs.multiple_choice import MultipleChoiceEnvironment, ShortAnswerEnvironment
from rl_envs.reasoning_gym.environment import read_answer
from rl_envs.sliding_puzzle import SlidingPuzzleEnvironment
from rl_envs.weather import WeatherEnvironment

from .conftest import answered


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("four", "four"),
        ("", ""),
        ("<think>five</think>four", "four"),
        ("five</think>four", "four"),
        ("<think>five", ""),
        ("<think>five</think>", ""),
        ("<think>a</think>five<think>b</think>four", "four"),
        ("<think>a</think>five<think>b", ""),
        ("four<think>b</think>", ""),
    ],
)
def test_the_answer_follows_the_last_closing_tag(completion, answer):
    assert final_text(completion) == answer


COMMAS = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
BOARD = {"board": [[1, 2], [0, 3]]}


@pytest.mark.parametrize(
    ("kind", "metadata", "right", "wrong"),
    [
        (ArithmeticEnvironment, {"expected_answer": "4"}, "4", "5"),
        (ArithmeticEnvironment, {"expected_answer": "4", "in_box": True}, r"\boxed{4}", r"\boxed{5}"),
        (WeatherEnvironment, {"expected_answer": "rain"}, "Prediction: rain", "Prediction: sun"),
        (MultipleChoiceEnvironment, {"expected_answer": "B", "choices": ["4", "5"]}, "B", "A"),
        (ShortAnswerEnvironment, {"expected_answer": "Bern"}, "Bern", "Basel"),
        (GuessNumberEnvironment, {"secret": 4}, "4", "5"),
        (InstructionFollowingEnvironment, COMMAS, "Yes.", "Yes, it is."),
        (SlidingPuzzleEnvironment, BOARD, "<move>3</move>", "<move>1</move>"),
    ],
)
def test_thinking_neither_earns_nor_costs_a_reward(kind, metadata, right, wrong):
    completions = [right, f"<think>{wrong}</think>{right}", f"{wrong}</think>{right}", f"<think>{right}</think>{wrong}"]
    completions += [f"<think>{right}</think>", f"<think>{right}"]
    result = kind().step([answered(text) for text in completions], [dict(metadata) for _ in completions])
    rewards = result.rewards["solved"] if isinstance(result.rewards, dict) else result.rewards
    assert rewards.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_reasoning_gym_reads_no_thinking():
    assert read_answer("<think><answer>5</answer></think><answer>4</answer>", "answer") == "4"
    assert read_answer("<think><answer>4</answer></think>", "answer") is None
    assert read_answer("<think>5</think> 4 ", None) == "4"
