"""A run over two ranks stops if their weights differ."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
TWO_RANKS = {
    "grpo": {"num_prompts_per_step": 8, "max_num_steps": 3, "adv_estimator": {"name": "reinforce_plus_plus"}},
    "policy": {"train_global_batch_size": 32, "optimizer": {"kwargs": {"lr": 0.01}}, "scheduler": None},
    "cluster": {"workers_per_node": 2},
    "checkpointing": {"save_period": 1},
}


def run_with(train, name):
    run = train({**TWO_RANKS, "policy": {**TWO_RANKS["policy"], "backend": f"wrong_plugins.policies.{name}.Policy"}},
                environment={"PYTHONPATH": str(TESTS)})  # fmt: skip
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
