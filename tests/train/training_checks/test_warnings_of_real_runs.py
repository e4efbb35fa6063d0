"""Warnings of `rl_train.metrics.run_warnings`, provoked by short runs of a model with a million parameters."""

import importlib
import sys

import pytest
from short_runs import RUN

REWARDS = """
def nothing(completion):
    return 0.0

def always(completion):
    return 1.0

def length(completion):
    return float(len(completion))

def ones(completion):
    return float(completion.count("1"))

def ones_above_average(completions, **_):
    ones = [completion.count("1") for completion in completions]
    return [each - sum(ones) / len(ones) for each in ones]
"""
TEXTS = {
    "truncated": "completions of the last 5 steps were cut off",
    "no_reward": "no completion of the last 5 steps was rewarded",
    "equal_rewards": "the samples of each prompt all had equal rewards",
    "longer_and_longer": "it may pay for length",
    "held_out_falls": "held-out accuracy fell from",
    "entropy": "the policy has stopped exploring",
    "far_from_reference": "the KL to the reference policy has been above",
    "unparsed": "found an answer in fewer than 10 % of the completions",
    "no_learning_rate": "the learning rate has been 0 for 5 steps",
}
QUIET = {"grpo": {"max_num_steps": 5}, "policy": {"optimizer": {"kwargs": {"lr": 1e-6}}}}
"""Five steps in which the model hardly changes."""


@pytest.fixture
def warned(train, tmp_path, monkeypatch):
    """Trains and returns the names of the warnings; each is printed once."""
    module = f"rewards_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()

    def run(changes, *overrides, env=None, reward=None):
        base = RUN | {"env": env or RUN["env"]}
        if reward is not None:
            base["env"] = (env or {}) | {"task": {"reward_fn": f"{module}.{reward}"}}
        code, output, metrics = train(changes, *overrides, base=base)
        assert code == 0, output
        counts = {name: output.count(text) for name, text in TEXTS.items()}
        assert set(counts.values()) <= {0, 1}, output
        return {name for name, count in counts.items() if count}, metrics

    yield run
    sys.modules.pop(module, None)


@pytest.mark.slow
def test_a_learning_rate_of_zero(warned):
    found, _ = warned(QUIET, "policy.optimizer.kwargs.lr=0.0")
    assert found == {"no_learning_rate"}


def test_rewards_that_are_all_zero(warned):
    found, _ = warned(QUIET, reward="nothing")
    assert found == {"no_reward"}


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_answers_that_the_environment_cannot_find(warned):
    found, _ = warned(QUIET, env={"math": {"num_workers": 1}})
    assert "unparsed" in found


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_completions_that_are_cut_off_except_for_one_that_ends_by_chance(warned):
    found, metrics = warned(QUIET, "policy.generation.max_new_tokens=1")
    assert min(row["length/truncated_frac"] for row in metrics) < 1.0
    assert found == {"truncated"}


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_a_policy_that_samples_one_token_only_and_leaves_its_reference(warned):
    changes = {"grpo": {"max_num_steps": 25}, "loss_fn": {"reference_policy_kl_penalty": 1e-5}}
    found, _ = warned(changes, reward="ones_above_average")
    assert {"entropy", "far_from_reference"} <= found


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_rewards_that_are_equal_for_all_samples(warned):
    found, metrics = warned(QUIET, reward="always")
    assert {row["reward/equal_groups_frac"] for row in metrics} == {1.0}
    assert found == {"equal_rewards"}


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_a_reward_for_length_makes_completions_longer_until_they_are_cut_off(warned):
    changes = {
        "grpo": {"max_num_steps": 12},
        "policy": {
            "max_total_sequence_length": 32,
            "optimizer": {"kwargs": {"lr": 2e-3}},
            "generation": {"max_new_tokens": 24},
        },
    }
    found, metrics = warned(changes, reward="length")
    assert metrics[-1]["length/mean"] > 3 * metrics[0]["length/mean"]
    assert "longer_and_longer" in found


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_a_reward_that_contradicts_the_validation_makes_held_out_accuracy_fall(warned):
    changes = {
        "grpo": {"max_num_steps": 12, "val_period": 2, "val_at_start": True},
        "policy": {"optimizer": {"kwargs": {"lr": 1e-3}}},
        "data": {
            "train": {"task_name": "task", "min_digits": 2},
            "validation": {"dataset_name": "arithmetic", "num_samples": 40, "min_digits": 2, "task_name": "arithmetic"},
        },
    }
    found, metrics = warned(changes, env={"arithmetic": {"num_workers": 1}}, reward="ones")
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"]
    assert "held_out_falls" in found


@pytest.mark.full("a variant of test_rewards_that_are_all_zero")
def test_a_run_that_learns_gives_no_warning(warned):
    found, metrics = warned({"grpo": {"max_num_steps": 15}, "policy": {"optimizer": {"kwargs": {"lr": 2e-4}}}})
    assert found == set()
    assert len(metrics) == 15
