"""Reward functions: what they are called with, what they may return, and how several are combined."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from environment_steps import step_checked

from rl_core.environments.scorer import named_rewards
from rl_core.errors import ConfigError, DataError, RLCoreError, UserError
from rl_core.interfaces import EnvironmentReturn
from rl_core.testing.outputs.environment import checked_metrics, checked_return
from rl_train.rewards.config import FunctionEnvironmentConfig
from rl_train.rewards.environment import FunctionEnvironment, named_functions
from rl_train.rewards.functions import RewardFunctionError, read_rewards, reward_function

PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]


def score(given, completions, metadata=None, *, as_messages=False):
    """The checked result of the environment for completions of one prompt."""
    environment = FunctionEnvironment(functions=named_functions(given))
    environment.as_messages = as_messages
    logs = [[*PROMPT, {"role": "assistant", "content": text}] for text in completions]
    try:
        made = step_checked(environment, "mine", logs, metadata or [{"expected_answer": "4"} for _ in completions])
        return made._replace(rewards=named_rewards(made.rewards))
    finally:
        environment.shutdown()


def test_a_function_of_one_row_gets_texts_the_conversation_and_the_fields_of_the_row():
    seen = []

    def f(prompt, completion, expected_answer, **row):
        seen.append((prompt, completion, expected_answer, row))
        return completion == expected_answer

    made = score(f, ["4", "5"], [{"expected_answer": "4", "level": 1}, {"expected_answer": "4", "level": 2}])
    assert made.rewards["f"].tolist() == [1.0, 0.0]
    assert made.terminateds.tolist() == [True, True]
    assert [entry[:3] for entry in seen] == [("2+2?", "4", "4"), ("2+2?", "5", "4")]
    assert seen[1][3] == {"messages": [*PROMPT, {"role": "assistant", "content": "5"}], "level": 2, "completion_ids": []}


def test_a_function_gets_only_the_arguments_that_it_names():
    assert score(lambda completion: len(completion), ["abc"]).rewards["<lambda>"].tolist() == [3.0]


def test_a_trl_function_is_called_once_with_lists_of_texts_and_columns():
    calls = []

    def reward(prompts, completions, expected_answer, **kwargs):
        calls.append((prompts, completions, expected_answer, kwargs))
        return [1.0 if c == a else None for c, a in zip(completions, expected_answer, strict=True)]

    made = score(reward, ["4", "5", "4"])
    assert calls == [(["2+2?"] * 3, ["4", "5", "4"], ["4"] * 3, {"completion_ids": [[]] * 3})]
    assert made.rewards["reward"].tolist() == [1.0, 0.0, 1.0]
    assert made.scored.tolist() == [True, False, True]


def test_a_trl_function_gets_messages_if_the_data_is_conversational():
    def reward(completions, **kwargs):
        assert kwargs["prompts"][0] == PROMPT
        return [len(completion[0]["content"]) for completion in completions]

    made = score(reward, ["a", "bcd"], as_messages=True)
    assert made.rewards["reward"].tolist() == [1.0, 3.0]


def test_a_field_that_some_rows_lack_is_none_in_the_column_of_a_batch():
    def reward(completions, level=None):
        return [0.0 if each is None else each for each in level]

    assert score(reward, ["a", "b"], [{"level": 3}, {}]).rewards["reward"].tolist() == [3.0, 0.0]


def test_tensors_numpy_numbers_and_booleans_are_rewards():
    assert score(lambda completions: torch.tensor([1.5, 2.0]), ["a", "b"]).rewards["<lambda>"].tolist() == [1.5, 2.0]
    assert score(lambda completion: torch.tensor(0.5).numpy().item(), ["a"]).rewards["<lambda>"].tolist() == [0.5]
    assert score(lambda completion: torch.tensor(0.5), ["a"]).rewards["<lambda>"].tolist() == [0.5]
    assert score(lambda completion: True, ["a"]).rewards["<lambda>"].tolist() == [1.0]


def test_async_calls_of_one_batch_run_concurrently_and_others_in_the_calling_thread():
    waiting = 0
    everyone = None

    async def slow(completion):
        nonlocal waiting, everyone
        everyone = everyone or asyncio.Event()
        waiting += 1
        if waiting == 3:
            everyone.set()
        await everyone.wait()  # ends only if all three calls have started
        return float(len(completion))

    def here(completion):
        return float(threading.current_thread() is threading.main_thread())

    made = score([slow, here], ["a", "bb", "ccc"])
    assert made.rewards["slow"].tolist() == [1.0, 2.0, 3.0]
    assert made.rewards["here"].tolist() == [1.0, 1.0, 1.0]


def test_several_functions_give_named_rewards_and_a_row_without_any_is_not_scored():
    def parts(completion):
        return {"length": len(completion), "digits": None}

    def only_digits(completion):
        return 1.0 if completion.isdigit() else None

    made = score([parts, only_digits], ["12", "ab"])
    assert {name: values.tolist() for name, values in made.rewards.items()} == {"length": [2.0, 2.0], "only_digits": [1.0, 0.0]}
    assert made.scored.tolist() == [True, True]
    assert score(only_digits, ["12", "ab"]).scored.tolist() == [True, False]
    assert score(only_digits, ["ab"]).scored.tolist() == [False]


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(RLCoreError, match="reward 'x', but another function did so too"):
        score([lambda completion: {"x": 1.0}, named("other", lambda completion: {"x": 2.0})], ["a"])
    with pytest.raises(ConfigError, match="several functions named <lambda>"):
        score([lambda completion: 1.0, lambda completion: 2.0], ["a"])
    assert score({"a": lambda completion: 1.0, "b": lambda completion: 2.0}, ["x"]).rewards["b"].tolist() == [2.0]


def named(name, function):
    function.__name__ = name
    return function


class CallableObject:
    async def __call__(self, completion):
        return float(len(completion))


def test_an_object_with_an_async_call_is_a_function():
    assert score(CallableObject(), ["abc"]).rewards["CallableObject"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completion: "0.5", "called with the completion 'a', returned '0.5' (str) as a reward. Return a finite number"),
        (lambda completion: float("nan"), "returned nan (float) as a reward"),
        (lambda completion: np.float32("inf"), "inf) (float32) as a reward"),
        (lambda completion: np.str_("0.5"), "'0.5') (str_) as a reward"),
        (lambda completion: torch.tensor([1.0]), "returned tensor([1.]) (Tensor) as a reward"),
        (lambda completion: {"a": 1.0, "b": float("nan")}, "returned nan (float) as a reward"),
        (lambda completions: [1.0, float("nan")], "called with the completion 'b', returned nan (float) as a reward"),
        (lambda completion: {1: 0.5}, "returned a reward named 1"),
        (lambda completion: [0.5], "(list) as a reward"),
        (lambda completions: [1.0], "called with 2 completions and returned list of 1 values"),
        (lambda completions: 1.0, "called with 2 completions and returned float"),
        (lambda completion: 1 / 0, "raised ZeroDivisionError at "),
    ],
)
def test_wrong_results_are_errors_that_say_what_was_returned(function, says):
    with pytest.raises((UserError, RewardFunctionError)) as caught:
        score(function, ["a", "b"])
    assert says in str(caught.value)
    assert "reward function <lambda>" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda question, completion: 0.0, "requires 'question', but only gets prompt, completion, messages, completion_ids"),
        (lambda completions, answer: [], "requires 'answer', but only gets prompts, completions"),
    ],
)
def test_missing_parameters_are_errors_that_list_what_there_is(function, says):
    with pytest.raises(ConfigError, match="env_keys") as caught:
        score(function, ["a"])
    assert says in str(caught.value)


def test_parameters_that_only_trl_passes_are_not_looked_for_in_the_data():
    with pytest.raises(ConfigError, match="Only TRL passes trainer_state: give such parameters a default") as caught:
        score(lambda completions, trainer_state: [], ["a"])
    assert "env_keys" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "is a int, not a function"),
        (dict, "is a class, not a function"),
        (lambda prompt: 0.0, "(prompt) does not take the completion"),
        (lambda completion, /: 0.0, "positional-only"),
    ],
)
def test_what_cannot_be_called_with_keywords_is_refused(given, says):
    with pytest.raises(ConfigError) as caught:
        reward_function(given, name="f", label="f")
    assert says in str(caught.value)


def test_a_field_with_the_name_of_an_argument_and_metadata_that_is_not_a_mapping_are_refused():
    with pytest.raises(ConfigError, match="field 'prompt'"):
        score(lambda completion: 0.0, ["a"], [{"prompt": "x"}])
    with pytest.raises(DataError, match="metadata of a row is a list"):
        score(lambda completion: 0.0, ["a"], [[1]])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"reward_fn": "m.f", "reward_fns": {"a": "m.f"}},
        {"reward_fn": "f"},
        {"reward_fns": {"a": "f"}},
    ],
)
def test_a_section_names_one_function_or_several_by_their_paths(values):
    with pytest.raises(ValueError, match=r"reward_fn|dotted path"):
        FunctionEnvironmentConfig(**values)


def test_accuracy_counts_rewards_above_the_threshold(tmp_path, monkeypatch):
    (tmp_path / "lengths_as_rewards.py").write_text("def length(completion):\n    return len(completion)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = {"rewards": torch.tensor([1.0, 0.5, 0.0, 2.0])}
    for threshold, expected in ((None, {}), (0.5, {"accuracy": 0.5})):
        config = FunctionEnvironmentConfig(reward_fn="lengths_as_rewards.length", correct_above=threshold)
        environment = FunctionEnvironment(config)
        assert environment.global_post_process_and_metrics(rewards)[1] == expected
        assert environment.step([[{"role": "assistant", "content": "abc"}]], [None]).rewards["length"].tolist() == [3.0]


@pytest.mark.parametrize("name", ["mean", "std", "shaped"])
def test_a_reward_cannot_have_the_name_of_a_metric_of_every_reward(name):
    def f(completion):
        return {name: 1.0}

    with pytest.raises(ConfigError, match=f"the name '{name}' is reserved: `reward/{name}` is a metric of every reward"):
        named_functions({name: f})
    with pytest.raises(RLCoreError, match=f"returned a reward with a reserved name: the name '{name}' is reserved"):
        read_rewards({name: 1.0}, name="f", label="f")


def test_an_environment_cannot_return_a_reward_or_a_metric_with_a_reserved_name():
    names = {"task_name": "t", "environment_class": "Env"}
    with pytest.raises(RLCoreError, match=r"the metric 'wait_s' .* reports `env/t/wait_s` itself"):
        checked_metrics(({}, {"wait_s": 1.0}), **names)
    found = EnvironmentReturn(
        observations=[{"role": "user", "content": ""}],
        metadata=[{}],
        next_stop_strings=[None],
        rewards={"std": torch.ones(1)},
        terminateds=torch.ones(1),
    )
    with pytest.raises(RLCoreError, match="reserved name: the name 'std' is reserved"):
        checked_return(found, rows=1, **names)
