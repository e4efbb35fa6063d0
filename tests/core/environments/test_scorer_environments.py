"""Environments that only say how good an answer is: rewards, metrics of facts, errors, and scoring of whole batches."""

import re
from pathlib import Path

import pytest
from environment_steps import step_checked

from rl_core.config.schema import EnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.scorer import Score, ScorerEnvironment, StepResult, environment_return, step_results
from rl_core.errors import ConfigError, DataError, RLCoreError, UserError
from rl_core.interfaces import EnvironmentInterface
from rl_core.testing.outputs.environment import metrics_checked
from rl_core.testing.outputs.environment import step_checked as results_of


def asked(*texts):
    return [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]


class LengthConfig(EnvironmentConfig):
    longest: int = 3


class Lengths(ScorerEnvironment):
    config_class = LengthConfig

    def score(self, text, info):
        if "words" not in info:
            raise DataError("the metadata needs `words`.")
        lengths = [len(word) for word in text.split()]
        is_short = len(text) <= self.config.longest
        return Score(float(is_short), {"accuracy": is_short, "word_length": lengths}, answer=text, metadata={"read": lengths})


def test_an_answer_is_the_text_after_thinking_and_its_row_ends_with_the_score():
    made = Lengths().step(asked("<think>a long thought</think>abc", "abcd"), [{"words": 1}, {"words": 2}])
    assert made.rewards.tolist() == [1.0, 0.0]
    assert made.terminateds.tolist() == [1.0, 1.0]
    assert made.answers == ["abc", "abcd"]
    assert [(info["words"], info["read"]) for info in made.metadata] == [(1, [3]), (2, [4])]


def test_metrics_are_the_means_of_facts_and_a_list_counts_with_each_of_its_numbers():
    environment = Lengths()
    made = environment.step(asked("a bb", "a", ""), [{"words": 1}] * 3)
    batch = BatchedDataDict({"extra_env_info": [*made.metadata, None]})
    assert metrics_checked(environment, "t", batch) == {"accuracy": 2 / 3, "word_length": pytest.approx(4 / 3)}


def test_a_fact_without_a_number_has_no_metric():
    made = Lengths().step(asked(""), [{"words": 1}])
    assert metrics_checked(Lengths(), "t", BatchedDataDict({"extra_env_info": made.metadata})) == {"accuracy": 1.0}


def test_the_section_may_be_a_model_a_dict_or_missing():
    assert Lengths(LengthConfig(longest=5)).config.longest == 5
    assert Lengths({"longest": 5}).config.longest == 5
    assert Lengths().config == LengthConfig()
    with pytest.raises(ConfigError, match="longest"):
        Lengths({"longst": 5})


def test_wrong_metadata_is_reported_with_its_row():
    with pytest.raises(DataError, match=r"^Row 1: the metadata needs `words`\.$"):
        Lengths().step(asked("a", "b"), [{"words": 1}, None])
    with pytest.raises(DataError, match="Row 0: the metadata of Lengths must be a mapping, found 3"):
        Lengths().step(asked("a"), [3])


class Together(ScorerEnvironment):
    """Scores a batch at once, with named rewards; one answer fails and one cannot be scored."""

    def score_batch(self, message_log_batch, metadata):
        texts = [log[-1]["content"] for log in message_log_batch]
        longest = max(map(len, texts))
        scores = [Score({"longest": float(len(text) == longest)}, reply=text) for text in texts]
        return [*scores[:1], Score({}, scored=False), Score({}, failure="the service is down"), *scores[3:]]


def test_a_batch_may_be_scored_together_and_rows_may_fail():
    made = step_checked(Together(), "t", asked("ab", "b", "c", "d"), [None, {"x": 1}, {}, {}])
    results = step_results(made)
    assert [result.scored for result in results] == [True, False, False, True]
    assert [result.failure for result in results] == [None, None, "the service is down", None]
    assert [result.rewards for result in results] == [{"longest": 1.0}, {"longest": 0.0}, {"longest": 0.0}, {"longest": 0.0}]
    assert [result.metadata for result in results] == [None, {"x": 1}, {}, {}]
    assert metrics_checked(Together(), "t", BatchedDataDict({"extra_env_info": made.metadata})) == {}


def test_a_wrong_number_of_scores_and_a_class_without_a_scorer_are_errors():
    with pytest.raises(RLCoreError, match=r"Together.score_batch returned 3 scores for 1 answers"):
        Together().step(asked("a"), [None])
    for returned in (0.5, None):
        wrong = type("Wrong", (ScorerEnvironment,), {"score": lambda self, text, info, value=returned: value})
        with pytest.raises(UserError, match=rf"^Wrong returned {returned} for an answer. Return Score\(reward\)"):
            wrong().step(asked("a"), [None])
    with pytest.raises(NotImplementedError, match="ScorerEnvironment implements neither `score` nor `score_batch`"):
        ScorerEnvironment().step(asked("a"), [None])


def test_results_of_rows_and_a_response_are_the_same_and_missing_rewards_are_zero():
    results = [
        StepResult(observation={"role": "user", "content": "on"}, metadata={}, rewards={"a": 0.5}, terminated=False),
        StepResult(observation=None, metadata=None, rewards={"b": 1.0}, terminated=True, stop_strings=["!"], answer="4"),
    ]
    returned = environment_return(results)
    assert {name: values.tolist() for name, values in returned.rewards.items()} == {"a": [0.5, 0.0], "b": [0.0, 1.0]}
    again = step_results(returned)
    assert [result.rewards for result in again] == [{"a": 0.5, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    assert environment_return(again).metadata == [{}, None]
    assert environment_return([]).rewards.tolist() == []
    failed = returned._replace(scored=None, failures=["the service is down", None])
    assert [result.scored for result in step_results(failed)] == [False, True]


class Graded(Lengths):
    def score(self, text, info):
        return Score({"length": 1.0, "grade": "good" if "!" in text else 0.5})


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([{"reward": 0.5}, {"reward": "yes"}], r"\[0.5, 'yes'\] as rewards; row 1 has 'yes'"),
        ([{"reward": "0.5"}, {"reward": "1.0"}], r"\['0.5', '1.0'\] as rewards; row 0 has '0.5'"),
        ([{"a": 0.5, "b": 1}, {"a": None, "b": 2}], r"\[0.5, None\] as the reward 'a'; row 1 has None"),
        ([{"a": 0.5}, {"a": [1.0, 2.0]}], r"\[0.5, \[1.0, 2.0\]\] as the reward 'a'; row 1 has \[1.0, 2.0\]"),
    ],
)
def test_a_reward_that_is_not_a_number_is_named_with_its_row_and_its_class(rewards, found):
    class Replies(EnvironmentInterface):
        def step(self, message_log_batch, metadata):
            reply = {"role": "environment", "content": ""}
            return environment_return([StepResult(observation=reply, metadata={}, rewards=r, terminated=True) for r in rewards])

    with pytest.raises(RLCoreError, match=rf"Replies of task 't' returned {found}. Return a number for each row"):
        results_of(Replies(), "t", asked("a", "b"), [{}, {}])
    with pytest.raises(RLCoreError, match=r"Graded of task 't' returned .* as the reward 'grade'; row 1 has 'good'"):
        results_of(Graded(), "t", asked("a", "b!"), [{}, {}])


PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def test_the_examples_of_the_page_score_and_reply():
    names = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(example, names)
    capital = names["Capital"]()
    made = capital.step(asked("<think>Basel?</think>It is Bern.", "Basel"), [{"expected_answer": "bern"}] * 2)
    assert made.rewards.tolist() == [1.0, 0.0]
    batch = BatchedDataDict({"extra_env_info": made.metadata})
    assert metrics_checked(capital, "t", batch) == {"accuracy": 0.5, "one_word": 0.5}
    made = names["Echo"]().step(asked("hi", ""), [{}, None])
    assert made.observations[0] == {"role": "environment", "content": "hi"}
    assert (made.rewards.tolist(), made.terminateds.tolist()) == ([0.0, 1.0], [0.0, 1.0])
