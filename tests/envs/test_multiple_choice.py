r"""The environments `multiple_choice` and `short_answer`: which completions choose a letter or state words, and which hedge."""

import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_envs.multiple_choice import MultipleChoiceEnvironment, ShortAnswerEnvironment, normalized

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


def test_a_letter_at_the_end_of_a_long_text_is_not_a_choice():
    for gap in (" " * 5000, "\n" * 5000, "* " * 3000):
        made = MultipleChoiceEnvironment().step([answered(f"A{gap}B")], [{"expected_answer": "B"}])
        assert made.rewards.tolist() == [0.0]


STATED = [
    "The Beatles",
    "beatles",
    "Answer: the Beatles.",
    "**Answer:** *The Beatles*",
    r"\boxed{\text{Beatles}}",
    "I think of many.\nThe answer is: BEATLES!",
    "Answer: Queen\nAnswer: The Fab-Four",
    "fab four",
]
NOT_STATED = [
    "",
    " ",
    "the",
    "...",
    "Queen",
    "Beatle",
    "Beatles or Queen",
    "The Beatles, Queen",
    "not the Beatles",
    "Answer: The Beatles\nAnswer: Queen",
    "The Beatles were a band",
    r"\boxed{Beatles} or \boxed{Queen}",
    r"The Beatles \boxed{}",
    "Queen" + " " * 5000 + "Beatles",
    "Beatles " * 1000,
]


@pytest.mark.parametrize(("texts", "reward"), [(STATED, 1.0), (NOT_STATED, 0.0)])
def test_a_short_answer_is_the_expected_one_or_an_alias_as_a_whole(texts, reward):
    environment, row = ShortAnswerEnvironment(), {"expected_answer": "The Beatles", "aliases": ["Fab Four", "the"]}
    made = environment.step([answered(text) for text in texts], [row] * len(texts))
    assert [text for text, found in zip(texts, made.rewards.tolist(), strict=True) if found != reward] == []
    batch = BatchedDataDict({"rewards": made.rewards, "answers": made.answers, "extra_env_info": made.metadata})
    assert environment.global_post_process_and_metrics(batch)[1]["accuracy"] == reward


def test_equal_short_answers_are_equal_votes():
    texts = ["Answer: the Fab-Four", "Fab four.", "Queen", ""]
    made = ShortAnswerEnvironment().step([answered(text) for text in texts], [{"expected_answer": "Queen"}] * 4)
    assert [answer or None for answer in made.answers] == ["fab four", "fab four", "queen", None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Lord of the Rings", "lord of rings"),
        ("a.m.", "m"),
        ("Rock 'n' Roll", "rock n roll"),
        ("snake_case", "snake case"),
        ("O\u2019Neill", "o neill"),
        ("caf\u00e9 ANNA", "caf\u00e9 anna"),
        ("another theory", "another theory"),
        ("-42", "42"),
    ],
)
def test_answers_are_normalized_as_in_the_evaluation_of_triviaqa(text, words):
    assert normalized(text) == words


@given(st.text(alphabet=f"atnhe BX7{string.punctuation}\u2018\u2019\u00b4`\n"))
def test_normalization_drops_case_punctuation_and_articles(text):
    words = "".join(
        " " if sign in string.punctuation or sign in "\u2018\u2019\u00b4`" else sign.lower() for sign in text
    ).split()
    assert normalized(text) == " ".join(word for word in words if word not in ("a", "an", "the"))
    assert normalized(normalized(text)) == normalized(text)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "`expected_answer` of `short_answer` is None: expected a text with a word"),
        ({"expected_answer": "The"}, "is 'The': expected a text with a word"),
        ({"expected_answer": "x", "aliases": "y"}, "`aliases` of `short_answer` is 'y': expected a list of texts"),
        ({"expected_answer": "x", "aliases": [1]}, r"`aliases` of `short_answer` is \[1\]: expected a list of texts"),
    ],
)
def test_a_row_without_an_accepted_answer_is_refused_with_its_number(row, problem):
    with pytest.raises(DataError, match=f"Row 1: .*{problem}"):
        ShortAnswerEnvironment().step([answered("A")] * 2, [{"expected_answer": "x"}, row])
