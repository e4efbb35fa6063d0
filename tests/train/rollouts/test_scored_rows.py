"""Rows that an environment could not score, and weights of named rewards."""

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.algorithms.estimators import DecoupledEstimator, group_advantages, make_estimator
from rl_train.algorithms.policy_configs import AdvantageConfig
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import environment_metrics, summarize
from rl_train.rollouts.scheduled_source import RewardWeightCheck
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch


class Letters(EnvironmentInterface):
    """Named rewards: length and number of "a"; an empty completion cannot be scored."""

    def step(self, message_log_batch, metadata):
        texts = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(texts),
            metadata=metadata,
            next_stop_strings=[None] * len(texts),
            rewards={
                "length": torch.tensor([float(len(text)) for text in texts]),
                "a": torch.tensor([float(text.count("a")) for text in texts]),
            },
            terminateds=torch.ones(len(texts)),
            scored=[text != "" for text in texts],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"rows": len(batch["rewards"])}


def played(tokenizer, engine, texts, weights=None):
    """One group whose samples are these texts."""
    rows = [
        Trajectory(
            message_log=[{"role": "user", "content": "x", "token_ids": torch.tensor([5])}],
            metadata=None,
            task_name="letters",
            group_id=0,
            index=0,
            ordinal=0,
            sample=sample,
        )
        for sample in range(len(texts))
    ]
    answers = iter(texts)
    collector = Collector(
        generation=engine(lambda _: (next(answers) + "[EOS]", False)),
        environments={"letters": Letters()},
        tokenizer=tokenizer,
        seed=0,
        max_turns={"letters": 1},
        max_total_length=64,
        reward_weights={"letters": weights or {}},
    )
    collector.collect(rows, stream=SampleStream.TRAINING)
    return rows


def test_rows_that_were_not_scored_count_neither_in_statistics_nor_in_the_loss(tokenizer, engine_for):
    rows = played(tokenizer, engine_for, ["ab", "", "abcd"])
    metrics = summarize(rows)
    assert metrics["reward/mean"] == (2 + 1 + 4 + 1) / 2
    assert metrics["reward/length"] == 3.0
    assert metrics["rollout/unscored_frac"] == pytest.approx(1 / 3)
    assert environment_metrics(rows, {"letters": Letters()}) == {"env/letters/rows": 2.0}
    batch = to_batch(rows)
    assert batch["sample_mask"].tolist() == [1.0, 0.0, 1.0]
    advantages = make_estimator(AdvantageConfig())(batch)
    per_row = [float(values[values != 0].mean()) if bool((values != 0).any()) else 0.0 for values in advantages.values]
    # Two scored rows: plus and minus the same, as if the group had only them.
    assert per_row[1] == 0.0
    assert per_row[0] == pytest.approx(-per_row[2])
    assert per_row[2] == pytest.approx(2**-0.5, rel=1e-6)


def test_a_group_without_scored_rows_has_no_signal_and_no_statistic():
    rewards, groups = torch.tensor([1.0, 2.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1])
    scored = torch.tensor([True, True, False, False])
    found = group_advantages(rewards, groups, scored=scored)
    alone = group_advantages(rewards[:2], groups[:2])
    assert found.values.tolist() == [*alone.values.tolist(), 0.0, 0.0]
    assert found.equal.tolist() == [False, False, True, True]
    assert (found.equal_group_frac, found.mean_group_std) == (0.0, alone.mean_group_std)
    nothing = group_advantages(rewards, groups, scored=torch.zeros(4, dtype=torch.bool))
    assert nothing.values.tolist() == [0.0] * 4
    assert (nothing.equal_group_frac, nothing.mean_group_std) == (0.0, 0.0)


def test_one_scored_row_of_a_group_has_advantage_zero():
    found = group_advantages(torch.tensor([3.0, 9.0]), torch.tensor([0, 0]), scored=torch.tensor([True, False]))
    assert found.values.tolist() == [0.0, 0.0]


def test_weights_apply_to_the_reward_of_a_row_and_leave_its_parts_unchanged(tokenizer, engine_for):
    [row] = played(tokenizer, engine_for, ["aab"], weights={"length": 0.5, "a": -1.0})
    assert row.reward == 0.5 * 3 - 2
    assert row.reward_parts == {"length": 3.0, "a": 2.0}


def test_the_estimator_of_separate_rewards_uses_the_weights_of_the_environment():
    parts = [{"x": 0.0, "y": 1.0}, {"x": 1.0, "y": 0.0}]
    batch = BatchedDataDict(
        {
            "rewards": torch.zeros(2),
            "reward_parts": parts,
            "reward_weights": [{"x": 0.0}, {"x": 0.0}],
            "group_ids": torch.zeros(2, dtype=torch.int64),
            "token_mask": torch.ones(2, 1),
            "sample_mask": torch.ones(2),
        }
    )
    estimate = DecoupledEstimator(weights={}, normalize=False, leave_one_out=False, normalize_batch=False)
    assert estimate(batch).values[:, 0].tolist() == [0.5, -0.5]
    assert estimate.is_informative(batch).tolist() == [True, True]
    batch["reward_weights"] = [{"x": 0.0, "y": 0.0}] * 2
    assert estimate.is_informative(batch).tolist() == [False, False]


def test_a_weight_of_a_reward_that_the_first_step_lacks_is_refused_with_its_key(tokenizer, engine_for):
    rows = played(tokenizer, engine_for, ["a"], weights={"lenght": 2.0})
    with pytest.raises(ConfigError, match=r"has the name 'lenght'.*Did you mean 'length'") as caught:
        RewardWeightCheck({}).check(rows)
    assert caught.value.key == "env.letters.reward_weights"
    check = RewardWeightCheck({"letters": ("lenght",)})
    check.check(rows)
