"""Log-probabilities of engine and policy are compared in every step, before the weights change."""

import json

import pytest
from short_runs import RUN, merged

ROUNDED = {"grpo": {"max_num_steps": 4}, "policy": {"optimizer": {"kwargs": {"lr": 1e-4}}}}


def engine(name, **more):
    return {"policy": {"generation": {"backend": f"drifting_engines.{name}", **more}}}


def changed(*changes):
    result = ROUNDED
    for change in changes:
        result = merged(result, change)
    return result


def test_an_engine_that_drifts_after_a_refit_stops_the_run_before_the_next_step(train):
    code, output, metrics = train(changed(engine("OnlyInRollouts")))
    assert code == 1, output
    assert "Step 3: the generation backend OnlyInRollouts (drifting_engines) and the policy" in output
    assert "is 0.05 nats on average (allowed: 0.001" in output
    assert "`generate` of the generation backend OnlyInRollouts" in output
    assert "The step was not taken" in output
    assert len(metrics) == 2


def test_the_limit_holds_for_the_mean_of_the_step_and_not_for_its_first_microbatches(train):
    # 0.01 nats in 2 of 32 rows: above 0.001 in the first of 16 microbatches, below it in the step.
    few = {"policy": {"train_micro_batch_size": 2}}
    code, output, metrics = train(changed(engine("FirstRows"), few))
    assert code == 0, output
    assert 0.0003 < metrics[2]["agreement/mean"] < 0.001


@pytest.mark.parametrize("uses_scores", [False, True])
@pytest.mark.parametrize("rows", [4, 32])
def test_an_engine_that_differs_from_both_passes_of_the_policy_is_blamed(train, rows, uses_scores):
    size = {"policy": {"train_micro_batch_size": rows, "train_global_batch_size": 16 if uses_scores else 32}}
    code, output, _ = train(changed(engine("SlightlyStale"), size))
    assert code == 1, output
    assert "is 0.0011 nats on average (allowed: 0.001" in output
    assert "`generate` of the generation backend SlightlyStale (drifting_engines) must return" in output
    assert "so the training pass" not in output
    assert "The step was not taken" in output


def test_a_large_difference_stops_a_run_in_rounded_arithmetic_at_once(train):
    # With a tolerance, the run is judged like one in bfloat16.
    code, output, metrics = train(changed(engine("Far", canary_tolerance=0.01)))
    assert code == 1, output
    assert "Step 3: " in output
    assert "Far (drifting_engines)" in output
    assert len(metrics) == 2


@pytest.mark.slow
def test_a_doubtful_difference_is_decided_by_the_canary_which_moves_the_baseline(train, tmp_path):
    code, output, metrics = train(
        changed(engine("OnlyInRollouts", canary_tolerance=0.01), {"checkpointing": {"enabled": True, "save_period": 4}})
    )
    assert code == 0, output
    assert "step 3: the log-probabilities of engine and policy differ by 0.05 nats on average" in output
    assert [round(step["agreement/mean"], 3) for step in metrics] == [0.0, 0.0, 0.05, 0.05]
    assert "refit/canary_error" in metrics[2]
    assert "refit/canary_error" not in metrics[3]  # not twice in ten steps
    state = json.loads(next((tmp_path / "runs").glob("*/checkpoints/step_000004/state.json")).read_text())
    assert state["algorithm"]["agreement"]["moved"] == pytest.approx(0.05, abs=1e-3)


def test_a_doubtful_difference_stops_the_run_if_the_canary_fails(train):
    code, output, metrics = train(changed(engine("Everywhere", canary_tolerance=0.01)))
    assert code == 1, output
    assert "canary tokens they differ by 0.05 nats" in output
    assert len(metrics) == 2


@pytest.mark.slow
def test_without_tokens_to_compare_the_canary_runs_after_the_first_optimizer_step(train):
    distillation = {
        "distillation": {"num_prompts_per_step": 8, "max_num_steps": 4, "student_data_fraction": 0.0},
        "teacher": {"backend": "hf", "model_name": RUN["policy"]["model_name"], "max_total_sequence_length": 16},
        "loss_fn": {"topk": 18},
        "data": {"train": {"with_response": True}},
    }
    base = {key: value for key, value in RUN.items() if key not in ("grpo", "env")}
    code, output, metrics = train(distillation, base=base)
    assert code == 0, output
    assert not any("agreement/mean" in step for step in metrics)
    assert ["refit/canary_error" in step for step in metrics] == [True, True, False, False]
