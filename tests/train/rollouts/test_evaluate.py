"""Validation prompts: always the same, graded by their environment, with scores worked by hand."""

import itertools

import pytest
import torch

from rl_core.interfaces import EnvironmentReturn
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.evaluation import Evaluation, correct_rollouts, default_ks, grouped, score


def datum(tokenizer, index, task="judge", cut=False):
    text = f"q{index}"
    ids = torch.tensor(tokenizer(f"<u>{text}\n<a>")["input_ids"])
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids}],
        "length": len(ids),
        "extra_env_info": {"expected": "a"} if task == "judge" else {"turns": 1},
        "task_name": task,
        "idx": index,
        "loss_multiplier": 0.0 if cut else 1.0,
        "stop_strings": None,
    }


@pytest.fixture
def evaluation_of(tokenizer, engine_for, environments):
    """An evaluation with an engine that returns the given texts cyclically."""

    def make(said, *, samples=1, rows=None, max_samples=None, batch_size=2):
        texts = itertools.cycle(said)
        rows = rows or [datum(tokenizer, i) for i in range(5)]
        return Evaluation(
            collector=Collector(
                generation=engine_for(lambda prompt: (next(texts) + "[EOS]", False)),
                environments=environments,
                tokenizer=tokenizer,
                seed=7,
                max_turns={"judge": 1, "count": 1},
                max_total_length=200,
            ),
            prompts=BatchedDataLoader(rows, batch_size=batch_size, shuffle=False, collate=list),
            max_samples=max_samples,
            samples_per_prompt=samples,
            greedy=False,
        )

    return make


def scores_of(evaluation, ks, **options):
    rows = evaluation.play()
    judgement = correct_rollouts(rows, evaluation.collector.environments, **options)
    return score(grouped(rows, judgement, samples_per_prompt=evaluation.samples_per_prompt), judgement, ks=ks)


@pytest.mark.parametrize(("most", "asked"), [(None, [0, 1, 2, 3, 4]), (3, [0, 1, 2]), (2, [0, 1]), (9, [0, 1, 2, 3, 4])])
def test_every_validation_asks_the_same_first_prompts_with_the_same_seeds(evaluation_of, most, asked):
    evaluation = evaluation_of(["a"], max_samples=most, samples=2)
    engine = evaluation.collector.generation
    first, again = evaluation.play(), evaluation.play()
    assert [row.index for row in first] == [row.index for row in again] == [i for i in asked for _ in range(2)]
    calls = len(engine.asked) // 2
    assert [call["seeds"] for call in engine.asked[:calls]] == [call["seeds"] for call in engine.asked[calls:]]
    assert evaluation.num_prompts == len(asked)


def test_progress_counts_the_prompts_that_are_done(evaluation_of):
    progress = []
    evaluation_of(["a"], samples=3).play(progress.append)
    assert progress == [2, 4, 5]


def test_scores_of_two_prompts_worked_by_hand(evaluation_of, tokenizer):
    # Prompt 0: a a b b, prompt 1: b b b a. a is correct, with reward 1.25; b is wrong, with reward 0.25.
    rows = [datum(tokenizer, 0), datum(tokenizer, 1, cut=True)]
    found = scores_of(evaluation_of(list("aabbbbba"), samples=4, rows=rows), (1, 2, 4))
    values = {name: estimate.value for name, estimate in found.metrics.items()}
    assert values == pytest.approx(
        {
            "mean@4": 3 / 8,
            "pass@1": 3 / 8,
            "pass@2": (5 / 6 + 1 / 2) / 2,
            "pass@4": 1.0,
            "cons@1": 3 / 8,
            "cons@2": (1 / 2 + 1 / 4) / 2,
            "cons@4": (1 / 2 + 0) / 2,
            "reward": (0.75 + 0.5) / 2,
            "reward/right": 3 / 8,
            "reward/bonus": 0.25,
            "length": 2.0,
            "truncated_frac": 0.0,
        }
    )
    # The standard deviation of the two prompts' 1/2 and 1/4 is sqrt(2)/8, over sqrt(2).
    assert found.metrics["mean@4"].standard_error == pytest.approx(1 / 8)
    assert (found.num_prompts, found.samples_per_prompt, found.max_length) == (2, 4, 2)
    assert found.num_truncated_prompts == 1
    assert found.not_reported == {}


def test_rewards_without_accuracy_are_not_reported_as_accuracy(evaluation_of):
    # The judge adds a bonus to every reward; only its accuracy shows which rows are correct.
    evaluation = evaluation_of(["a", "b"])
    rows = evaluation.play()
    assert [row.reward for row in rows] == [1.25, 0.25, 1.25, 0.25, 1.25]
    assert correct_rollouts(rows, evaluation.collector.environments).correct == [True, False, True, False, True]
    assert correct_rollouts(rows, evaluation.collector.environments, reward_above=0.2).correct == [True] * 5


def test_validation_with_several_samples_reports_pass_and_consensus(evaluation_of):
    metrics, rows = evaluation_of(["a", "b", "a"], samples=3).evaluate()
    assert len(rows) == 15
    assert metrics["validation/accuracy"] == pytest.approx(2 / 3)
    assert metrics["validation/pass@1"] == pytest.approx(2 / 3)
    assert metrics["validation/pass@2"] == metrics["validation/pass@3"] == 1.0
    assert metrics["validation/cons@3"] == 1.0
    assert metrics["validation/cons@2"] == pytest.approx(2 / 3)


def test_validation_with_one_sample_reports_what_it_always_did(evaluation_of):
    metrics, _ = evaluation_of(["a", "b"]).evaluate()
    assert sorted(metrics) == [f"validation/{name}" for name in ("accuracy", "length", "reward", "rows", "truncated_frac")]


def test_an_environment_without_accuracy_has_no_pass_at_k_with_a_reason(evaluation_of, tokenizer):
    rows = [datum(tokenizer, 0), datum(tokenizer, 1, task="count")]
    evaluation = evaluation_of(["a"], samples=2, rows=rows)
    found = scores_of(evaluation, (1, 2))
    assert not [name for name in found.metrics if "@" in name]
    assert found.not_reported["pass@k"] == "count: the environment reports no accuracy"
    assert found.metrics["reward"].value == pytest.approx((1.25 + 1) / 2)
    by_reward = scores_of(evaluation, (1, 2), reward_above=0.5)
    assert by_reward.metrics["pass@2"].value == 1.0
    assert by_reward.not_reported == {"cons@k": "count: the environment returned no answers"}


def test_accuracy_that_needs_more_than_rewards_is_computed_per_row(evaluation_of, environments):
    class Strict(type(environments["judge"])):
        """All answers get the same reward."""

        def step(self, logs, metadata):
            return EnvironmentReturn(*super().step(logs, metadata))._replace(rewards=torch.ones(len(logs)))

        def global_post_process_and_metrics(self, batch):
            return batch, {"accuracy": sum(answer == "a" for answer in batch["answers"]) / len(batch["answers"])}

    environments["judge"] = Strict()
    evaluation = evaluation_of(["a", "b", "b"])
    assert correct_rollouts(evaluation.play(), environments).correct == [True, False, False, True, False]


def test_fractional_accuracy_is_not_counted_as_correct_or_wrong(evaluation_of, environments):
    class Partial(type(environments["judge"])):
        def global_post_process_and_metrics(self, batch):
            return batch, {"accuracy": 0.5}

    environments["judge"] = Partial()
    found = scores_of(evaluation_of(["a"], samples=2), (1, 2))
    assert found.not_reported["pass@k"] == "judge: the environment's accuracy of one sample is 0.5, neither 0 nor 1"
    assert found.not_reported["cons@k"] == found.not_reported["pass@k"]


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_the_usual_ks_are_powers_of_two_and_all(n, ks):
    assert default_ks(n) == ks
