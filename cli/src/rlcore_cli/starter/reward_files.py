"""The reward function that `rlcore init` writes, and its test."""

from __future__ import annotations

MODULE = "rewards"
"""Name of the module; its file and its test are next to the config."""

_ANSWERS = '''"""Rewards for {data}: plain functions of a completion and the fields of its row."""


def correct(completion: str, expected_answer: str) -> float:
    """1.0 if the completion's answer is the expected one, 0.0 otherwise.

    The answer is what follows the last "Answer:", or the whole completion if it has none. Two texts are equal if they differ
    only in case, white space and a final period; numbers are equal if their values are.
    """
    answer = completion.rpartition("Answer:")[2]
    return float(normalized(answer) == normalized(str(expected_answer)))


def normalized(text: str) -> str | float:
    """The value of a number, or else the text in lower case."""
    words = " ".join(text.split()).removesuffix(".").lower()
    try:
        return float(words.replace(",", ""))
    except ValueError:
        return words
'''

_ANSWERS_TEST = '''"""Run with `pytest`. Add the wrong answers that your model finds: each is a reward that must stay 0."""

import pytest
from rewards import correct

EXPECTED = {expected}


@pytest.mark.parametrize("completion", [EXPECTED, f"Let me think.\\nAnswer: {{EXPECTED}}", f"Answer:  {{EXPECTED}}."])
def test_the_expected_answer_is_rewarded(completion):
    assert correct(completion, EXPECTED) == 1.0


WRONG = ["", "Answer:", f"{{EXPECTED}} or something else", f"not {{EXPECTED}}", f"Answer: {{EXPECTED}}\\nAnswer: unknown"]


@pytest.mark.parametrize("completion", WRONG)
def test_other_answers_are_not_rewarded(completion):
    assert correct(completion, EXPECTED) == 0.0
'''

_PROMPTS = '''"""Rewards for {data}: plain functions of a completion and the fields of its row."""

FULL_REWARD, NO_REWARD = 50, 200
"""Number of words up to which a completion is rewarded in full, and from which on it is not rewarded."""


def concise(completion: str) -> float:
    """1.0 for 1 to 50 words, falling to 0.0 at 200 words; 0.0 for an empty completion.

    The rows have no expected answer, so this rewards brevity only: replace it with what makes a completion good.
    """
    words = len(completion.split())
    if words == 0:
        return 0.0
    return min(1.0, max(0.0, (NO_REWARD - words) / (NO_REWARD - FULL_REWARD)))
'''

_PROMPTS_TEST = '''"""Run with `pytest`. Add the bad completions that your model finds: each is a reward that must stay low."""

from rewards import concise


def test_a_short_completion_is_rewarded_more_than_a_long_one():
    assert concise("word " * 50) == 1.0
    assert concise("word " * 125) == 0.5
    assert concise("word " * 300) == 0.0


def test_an_empty_completion_is_not_rewarded():
    assert concise("") == concise(" \\n") == 0.0
'''


def reward_files(data: str, expected: str | None) -> dict[str, str]:
    """The text of the reward function's file and of its test, by file name.

    Args:
        data: Name of the data file.
        expected: An expected answer of the data, which the test uses; None if rows have none.
    """
    source, test = (_PROMPTS, _PROMPTS_TEST) if expected is None else (_ANSWERS, _ANSWERS_TEST)
    return {
        f"{MODULE}.py": source.format(data=data) if expected is None else source.replace("{data}", data),
        f"test_{MODULE}.py": test if expected is None else test.format(expected=repr(expected)),
    }


def reward_function(*, has_answers: bool) -> str:
    """Import path of the function in the file."""
    return f"{MODULE}.correct" if has_answers else f"{MODULE}.concise"
