"""A run over two ranks stops if their weights differ, and with the same sentences as in one process."""

from pathlib import Path

import pytest
from wrong_plugins.registry import POLICIES

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
TWO_RANKS = {
    "grpo": {"num_prompts_per_step": 8, "max_num_steps": 3, "adv_estimator": {"name": "reinforce_plus_plus"}},
    "policy": {"train_global_batch_size": 32, "optimizer": {"kwargs": {"lr": 0.01}}, "scheduler": None},
    "cluster": {"workers_per_node": 2},
    "checkpointing": {"save_period": 1},
}


def run_with(train, name=None, **policy):
    if name is not None:
        policy["backend"] = f"wrong_plugins.policies.{name}.Policy"
    run = train(
        {**TWO_RANKS, "policy": {**TWO_RANKS["policy"], **policy}},
        environment={"PYTHONPATH": f"{TESTS}:{TESTS / 'train' / 'training_checks'}"},
    )
    code, output = run.wait()
    return code, " ".join(output.split())


def test_ranks_that_do_not_exchange_gradients_stop_the_run_after_the_first_step(train, tmp_path):
    code, output = run_with(train, "does_not_exchange_gradients")
    assert code == 1, output
    assert (
        "After step 1, the weights of the policy backend Policy (wrong_plugins.policies.does_not_exchange_gradients)" in output
    )
    assert "differ between rank 0 and rank 1, which hold the same weights" in output
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step_*"))


@pytest.mark.full("the test before this one compares a sample of the weights; this one all of them, at a checkpoint")
def test_a_single_element_that_differs_between_ranks_is_found_at_the_checkpoint(train, tmp_path):
    code, output = run_with(train, "changes_one_rank_alone")
    assert code == 1, output
    assert "After step 1, the weights of `policy` differ between rank 0 and rank 1" in output
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step_*"))


MORE = pytest.mark.full("another factor runs in CI, and all of them in one process")


@pytest.mark.parametrize(
    "name",
    [
        "divides_the_loss_by_two",
        pytest.param("divides_the_loss_by_four", marks=MORE),
        pytest.param("divides_the_loss_by_eight", marks=MORE),
        "keeps_the_gradient_of_the_last_microbatch",
        "reports_a_gradient_of_zero",
        pytest.param("averages_every_metric", marks=MORE),
        pytest.param("sums_every_metric", marks=MORE),
    ],
)
def test_a_wrong_policy_over_two_ranks_stops_with_the_words_of_one_process(train, name):
    code, output = run_with(train, name, train_micro_batch_size=4)
    assert code == 1, output
    # In one process, eight microbatches are averaged; here, four on each rank.
    words = [
        word.replace("0.125 times the sums", "0.25 times the sums").replace("such as 4", "such as 8")
        for word in POLICIES[name].words
    ]
    assert [word for word in words if word not in output] == [], output
    assert "NonFiniteError" not in output


def test_an_engine_that_differs_from_both_passes_over_two_ranks_is_blamed(train):
    generation = {"backend": "drifting_engines.SlightlyStale", "max_new_tokens": 5}
    code, output = run_with(train, generation=generation, optimizer={"kwargs": {"lr": 1e-4}}, train_micro_batch_size=4)
    assert code == 1, output
    assert "0.0011 nats on average (allowed: 0.001" in output
    assert "`generate` of the generation backend SlightlyStale (drifting_engines) must return" in output
    assert "The step was not taken, so the weights are unchanged." in output
    assert "a smaller learning rate" not in output
