"""A run stops if its policy does not do what it reports; the error names the policy and what it must do."""

import pytest
from short_runs import RUN

WRONG = {
    "sends_its_first_weights": ("weights of version 1", "sent the weights of version 1, but they are the same as before", {}),
    "counts_of_a_microbatch": ("Step 1: ", "passed global_valid_seqs 4 to the loss, but the optimizer step has 32", {}),
    "drops_the_last_microbatch": ("Step 1: ", "computed the loss of 28 rows", {}),
    "repeats_the_first_microbatch": ("Step 1: ", "The loss of every row must be computed once", {}),
    "reports_a_step_that_it_does_not_take": ("Step 1: ", "must take the optimizer steps that it reports", {}),
    "returns_no_metrics": ("Step 1: ", "returned no metrics of the loss", {}),
    "takes_one_step_for_all_rows": ("Step 1: ", "must take one step for each", {"policy": {"train_global_batch_size": 16}}),
    "shifts_log_probabilities_in_training": ("Step 1: ", "so the training pass of", {}),
    "steps_with_a_nan_loss": ("Step 1: ", "it must refuse such a step", {}),
    "swaps_rows_in_training": ("Step 1: ", "at position t of a row, the log-probability of token t of that row", {}),
    "trains_at_another_temperature": ("Step 1: ", "The step was not taken, so the weights are unchanged", {}),
    "scores_microbatches_in_reversed_order": (
        "Step 1: ",
        "it must return the scores in the order of the rows",
        {"policy": {"train_global_batch_size": 16, "generation": {"refit_canary": False}}},
    ),
}


def backend(name):
    return {"policy": {"backend": f"wrong_plugins.policies.{name}.Policy"}}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_stops_with_the_name_of_the_policy_and_its_broken_promise(train, name):
    step, promise, changes = WRONG[name]
    changes = {"policy": {**changes.get("policy", {}), **backend(name)["policy"]}}
    code, output, metrics = train(changes)
    assert code == 1, output
    assert "Traceback" not in output
    assert step in output
    assert f"Policy (wrong_plugins.policies.{name})" in output
    assert promise in output
    assert len(metrics) < 3


def test_scores_in_another_order_fail_the_canary_without_a_scoring_pass(train):
    code, output, _ = train(backend("scores_microbatches_in_reversed_order"))
    assert code == 1, output
    assert "canary tokens they differ by" in output
    assert "returns scores in another order than its rows" in output


def test_a_right_policy_trains_far_below_the_limits(train):
    code, output, metrics = train(backend("right"))
    assert code == 0, output
    assert len(metrics) == 3
    assert metrics[0]["agreement/tokens"] > 90
    assert max(step["agreement/mean"] for step in metrics) < 1e-3 / 3
    assert max(step["agreement/worst_row"] for step in metrics) < 0.1 / 3
    assert not [name for step in metrics for name in step if name.startswith("checks/")]


def test_a_second_call_of_train_in_a_step_is_not_compared_with_the_engine(train):
    ppo = {
        "ppo": {"num_prompts_per_step": 8, "max_num_steps": 2, "ppo_epochs": 2},
        "value": {"backend": "hf", "model_name": RUN["policy"]["model_name"], "optimizer": {"kwargs": {"lr": 0.01}}},
    }
    code, output, metrics = train(ppo, base={key: value for key, value in RUN.items() if key != "grpo"})
    assert code == 0, output
    assert all(step["agreement/mean"] < 1e-4 for step in metrics)
