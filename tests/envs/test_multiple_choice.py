r"""The environment `multiple_choice`: which completions choose a letter, and which hedge."""

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_envs.multiple_choice import MultipleChoiceEnvironment

from .conftest import answered

CHOICES = ["Mars", "Jupiter (gas).", "Venus, or Earth", "none of the above"]
RIGHT = [
    r"\boxed{B}",
    r"\boxed{(B)}",
    r"\boxed{\text{B}}",
    r"\boxed{b}",
    r"\boxed{B. Jupiter (gas)}",
    r"\boxed{Jupiter (gas)}",
    r"First \boxed{A}, no: \boxed{B}",
    r"\boxed{B}, so \boxed{B}",
    "The answer is B.",
    "The answer is (B).",
    "Answer: B",
    "**Answer:** B",
    "answer: **(B) Jupiter (gas).**",
    "A is tempting.\nThe correct answer is B because A is small.",
    "The answer is B. It has most moons.",
    "The answer is B. Jupiter (gas). It has most moons.",
    "Answer: A\nAnswer: B",
    "The answer is Jupiter (gas).",
    "B",
    "(B)",
    "option B",
    "jupiter (gas)",
]
WRONG = [
    r"\boxed{A}",
    "Answer: A",
    "Mars",
    r"\boxed{B}, no: \boxed{A}",
]
NO_CHOICE = [
    "",
    " ",
    r"\boxed{}",
    r"\boxed{A or B}",
    r"\boxed{B or A}",
    r"\boxed{A} or \boxed{B}",
    r"\boxed{A}\boxed{B}",
    r"\boxed{A, B, C, D}",
    r"\boxed{(B) Mars}",
    r"\boxed{not A}",
    r"B \boxed{5}",
    "The answer is B. Mars",
    "The answer is not B.",
    "Answer: B, C",
    "Answer: B and C",
    "Answer: B. or C",
    "It is B, I think",
    "Before: B",
    "A B C D",
    "B's",
    "E",
    "the answer is unclear",
    "Mars, Jupiter (gas), Venus, or Earth",
    "expected_answer",
]


@pytest.mark.parametrize(("texts", "reward", "answer"), [(RIGHT, 1.0, "B"), (WRONG, 0.0, "A"), (NO_CHOICE, 0.0, None)])
def test_a_completion_chooses_one_letter_or_none(texts, reward, answer):
    environment, row = MultipleChoiceEnvironment(), {"expected_answer": "B", "choices": CHOICES}
    made = environment.step([answered(text) for text in texts], [row] * len(texts))
    assert [text for text, found in zip(texts, made.rewards.tolist(), strict=True) if found != reward] == []
    assert [text for text, found in zip(texts, made.answers, strict=True) if (found or None) != answer] == []
    batch = BatchedDataDict({"rewards": made.rewards, "answers": made.answers, "extra_env_info": made.metadata})
    metrics = environment.global_post_process_and_metrics(batch)[1]
    assert metrics == {"accuracy": reward, "answered_frac": float(answer is not None)}


def test_only_the_expected_letter_is_right_for_every_letter():
    letters = "ABCDEFGHIJ"
    environment, texts = MultipleChoiceEnvironment(), [f"choice {number}" for number in range(10)]
    for form in (r"\boxed{%s}", "The answer is %s.", "(%s)"):
        logs = [answered(form % given) for _ in letters for given in letters]
        rows = [{"expected_answer": expected, "choices": texts} for expected in letters for _ in letters]
        assert torch.equal(environment.step(logs, rows).rewards, torch.eye(10).flatten())


def test_without_the_texts_of_the_choices_letters_are_read():
    texts = ["B", "Answer: (B)", "Answer: B Jupiter", "Jupiter"]
    rewards = MultipleChoiceEnvironment().step([answered(text) for text in texts], [{"expected_answer": "B"}] * 4).rewards
    assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_choices_that_are_letters_or_contain_each_other_are_not_confused():
    row = {"expected_answer": "B", "choices": ["B", "A", "A or B", "A, because"]}
    texts = ["B", "(B) A", "Answer: C", "A", "(A) B", r"\boxed{A or B}", "(B) A or B"]
    rewards = MultipleChoiceEnvironment().step([answered(text) for text in texts], [row] * len(texts)).rewards
    assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "`expected_answer` of `multiple_choice` is None: expected a letter from A to Z"),
        ({"expected_answer": "AB"}, "expected a letter from A to Z"),
        ({"expected_answer": "C", "choices": ["x", "y"]}, "expected a letter from A to B"),
        ({"expected_answer": 1, "choices": ["x", "y"]}, "is 1: expected a letter from A to B"),
        ({"expected_answer": "A", "choices": "xy"}, "`choices` of `multiple_choice` is 'xy': expected a list of texts"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused_with_its_number(row, problem):
    with pytest.raises(DataError, match=f"Row 1: .*{problem}"):
        MultipleChoiceEnvironment().step([answered("A")] * 2, [{"expected_answer": "A"}, row])
