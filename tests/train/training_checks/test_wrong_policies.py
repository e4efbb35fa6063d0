"""A run stops if its policy does not do what it reports; the error names the policy and what it must do."""

import pytest
from short_runs import RUN, merged
from wrong_plugins.registry import POLICIES


def backend(name):
    return {"policy": {"backend": f"wrong_plugins.policies.{name}.Policy"}}


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.marker == "train"])
def test_a_run_stops_with_the_name_of_the_policy_and_its_broken_promise(train, name):
    code, output, metrics = train(merged(POLICIES[name].changes, backend(name)))
    assert code == 1, output
    assert "Traceback" not in output
    assert f"Policy (wrong_plugins.policies.{name})" in output
    assert [words for words in POLICIES[name].words if words not in output] == [], output
    assert len(metrics) < 3


def test_a_policy_that_sends_old_weights_by_a_copying_transport_is_found_in_the_refit(train):
    changes = {**backend("sends_its_first_weights")["policy"], "generation": {"refit_transport": "shared_memory"}}
    code, output, metrics = train({"policy": changes})
    assert code == 1, output
    assert "sent the weights of version 1, but they are the same as before" in output
    assert len(metrics) == 1


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


@pytest.mark.parametrize("policy", ["Policy", "Dynamic"])
def test_a_policy_that_declares_the_factor_of_its_loss_trains_like_one_without(train, policy):
    code, output, scaled = train({"policy": {"backend": f"wrong_plugins.policies.scales_as_declared.{policy}"}})
    assert code == 0, output
    _, _, plain = train(backend("right"))
    assert [step["grad_norm"] for step in scaled] == pytest.approx([step["grad_norm"] for step in plain], rel=1e-4)


def test_a_second_call_of_train_in_a_step_is_not_compared_with_the_engine(train):
    ppo = {
        "ppo": {"num_prompts_per_step": 8, "max_num_steps": 2, "ppo_epochs": 2},
        "value": {"backend": "hf", "model_name": RUN["policy"]["model_name"], "optimizer": {"kwargs": {"lr": 0.01}}},
    }
    code, output, metrics = train(ppo, base={key: value for key, value in RUN.items() if key != "grpo"})
    assert code == 0, output
    assert all(step["agreement/mean"] < 1e-4 for step in metrics)


def test_a_loss_that_is_not_finite_accuses_nobody_if_the_log_probabilities_agree(train):
    code, output, metrics = train({"policy": {"backend": "nan_policy.Policy"}})
    assert code == 1, output
    assert metrics == []
    assert "a loss was not finite, but no comparison is beyond its limit" in output
    assert "Optimizer step 1 was not taken" in output
    assert "disagree" not in output
