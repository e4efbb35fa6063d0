"""Runs with `rollout.max_staleness`: all algorithms, rollouts of several turns, which continue during training, killed runs."""

import json
import os
import textwrap
from collections import Counter

import pytest
from e2e_runs import MODEL, ROOT, checkpoint_of, metrics_of

STEPS = 6
SLOW = textwrap.dedent(
    """
    import random
    import time
    import torch
    from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

    class SlowSums(EnvironmentInterface):
        '''Two turns; the response to each takes up to 0.4 s.'''

        def step(self, message_log_batch, metadata):
            time.sleep(random.random() * 0.4)
            turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": "1+2="} for _ in turns],
                metadata=metadata,
                next_stop_strings=[None] * len(turns),
                rewards=torch.rand(len(turns)),
                terminateds=torch.tensor([turn == 2 for turn in turns]),
            )
    """
)


CONTROL = textwrap.dedent(
    """
    from rl_core.plugins import Control

    def halve_and_stop(step):
        return Control(lr_factor=0.5, kl_weight=0.3, stop="half is enough" if step == 3 else None)
    """
)


@pytest.fixture
def config(tmp_path):
    """Two optimizer steps per step, so that staleness in steps differs from staleness in weight versions."""
    (tmp_path / "slow_sums.py").write_text(SLOW)
    return {
        "grpo": {"max_num_steps": STEPS, "max_rollout_turns": 2},
        "policy": {"max_total_sequence_length": 40},
        "loss_fn": {"ratio_to": "sampler"},
        "rollout": {"max_staleness": 2, "ahead": 2},
        "env": {"arithmetic": {"env_cls": "slow_sums.SlowSums", "num_workers": 4}},
        "checkpointing": {"save_period": 1},
    }


def rollouts_of(folder):
    files = sorted((folder / "runs/run/rollouts").glob("step_*.jsonl"))
    return {int(file.stem[-6:]): [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def assert_bound_is_held(folder, bound):
    """Recomputes the staleness of each turn from the files of the run, and compares it with the metric."""
    steps, rollouts = metrics_of(folder), rollouts_of(folder)
    delivered = {}  # by weight version: the last step whose refit delivered it
    stale = []
    for step in sorted(rollouts):
        delivered[steps[step]["refit/weight_version"]] = step
        ages = [max(step - delivered[version] for version in row["turn_versions"]) for row in rollouts[step]]
        assert steps[step]["staleness/steps_max"] == max(ages) <= bound
        stale += ages
    assert sorted(rollouts) == list(range(1, STEPS + 1))
    assert max(stale) > 0, "the run was synchronous"
    assert all(steps[step].get("mismatch/max", 0.0) < 1e-4 for step in steps)


def assert_each_prompt_is_trained_once(folder):
    trained = Counter(row["index"] for rows in rollouts_of(folder).values() for row in rows)
    assert len(trained) == STEPS * 4
    assert set(trained.values()) == {4}


@pytest.mark.slow
@pytest.mark.ray
def test_rollouts_of_several_turns_continue_during_training_within_the_bound(train, config, tmp_path):
    run = train(config)
    code, output = run.wait()
    assert code == 0, output
    assert_bound_is_held(tmp_path, bound=2)
    assert_each_prompt_is_trained_once(tmp_path)
    run.assert_gone()


@pytest.mark.slow
@pytest.mark.ray
def test_a_killed_run_with_rollouts_in_progress_resumes_without_losing_or_repeating_a_prompt(train, config, tmp_path):
    run = train(config)
    run.wait_for(lambda: checkpoint_of(3, tmp_path).exists())
    run.kill()
    run.process.wait()
    run.assert_gone()
    code, output = train(config).wait()
    assert code == 0, output
    assert_each_prompt_is_trained_once(tmp_path)


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_stopped_by_a_callback_with_rollouts_in_progress_continues_without_losing_or_repeating_a_prompt(
    train, config, tmp_path
):
    """On two ranks, whose learning rate and KL weight the callback changes."""
    (tmp_path / "control.py").write_text(CONTROL)
    callbacks = {"control": {"name": "control.halve_and_stop"}}
    loss = {**config["loss_fn"], "reference_policy_kl_penalty": 0.1}
    config = {**config, "loss_fn": loss, "cluster": {"workers_per_node": 2}, "callbacks": callbacks}
    run = train(config)
    code, output = run.wait()
    assert code == 0, output
    assert "stopped after step 3 by the callback 'callbacks.control' (control.halve_and_stop): half is enough" in output
    assert checkpoint_of(3, tmp_path).exists()
    run.assert_gone()
    code, output = train(config, "--resume", "runs/run").wait()
    assert code == 0, output
    assert_bound_is_held(tmp_path, bound=2)
    assert_each_prompt_is_trained_once(tmp_path)
    steps = metrics_of(tmp_path)
    # The rate of a step is that of its second optimizer step; the warm-up of two ends with the first step's.
    schedule = [min((2 * step) / 3, (40 - (2 * step - 1)) / 38) for step in range(1, STEPS + 1)]
    factors = [1.0] + [0.5] * (STEPS - 1)
    expected = [1e-4 * shape * factor for shape, factor in zip(schedule, factors, strict=True)]
    assert [steps[step]["lr"] for step in range(1, STEPS + 1)] == pytest.approx(expected)
    for step, row in steps.items():
        # The loss is that of the policy plus the weighted KL: float32 sums of terms of at most 1.
        weight = 0.1 if step == 1 else 0.3
        assert row["loss"] - row["loss/policy"] == pytest.approx(weight * row["kl/reference"], abs=3e-7)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.full("starts vLLM over Ray, which takes a minute; the same test runs with the Transformers engine")
@pytest.mark.parametrize("async_engine", [False, True])
def test_rollouts_of_vllm_continue_during_training_within_the_bound(train, config, tmp_path, async_engine):
    engine = {"backend": "vllm", "vllm_cfg": {"max_num_seqs": 32, "async_engine": async_engine}}
    code, output = train({**config, "policy": {**config["policy"], "generation": engine}}).wait()
    assert code == 0, output
    assert_bound_is_held(tmp_path, bound=2)


SUMS = {"arithmetic": {"env_cls": None, "num_workers": 1}}
MODEL_SECTION = {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 40}
CASES = {
    "dynamic sampling": {
        "grpo": {"use_dynamic_sampling": True, "batch_multiplier": 1.5},
        "data": {"train": {"num_samples": 1000}},
        "env": SUMS,
    },
    "ppo": {
        "grpo": None,
        "ppo": {"num_prompts_per_step": 16, "ppo_epochs": 2, "max_num_steps": STEPS, "seed": 3, "critic_warmup_steps": 1},
        "loss_fn": {"ratio_to": "policy", "use_importance_sampling_correction": True},
        "data": {"train": {"num_samples": 1000}},
        "env": SUMS,
        "value": {**MODEL_SECTION, "train_global_batch_size": 8, "optimizer": {"kwargs": {"lr": 1.0e-4}}},
    },
    "distillation with answers of the data": {
        "grpo": None,
        "distillation": {"num_prompts_per_step": 16, "student_data_fraction": 0.5, "max_num_steps": STEPS, "seed": 3},
        "loss_fn": {"topk": 4},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 1000, "with_response": True}},
        "env": SUMS,
        "teacher": MODEL_SECTION,
    },
    "segments and validation sets": {
        "grpo": {"max_rollout_turns": 2, "val_period": 2, "val_at_start": True},
        "rollout": {"history": "template"},
        "data": {
            "train": {"num_samples": 1000},
            "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
            "validation_sets": {"long": {"dataset_name": "arithmetic", "num_samples": 8, "min_digits": 2}},
        },
    },
    "an agent": {"env": {"arithmetic": None, "sums": {"agent": "examples.agents.adder:add"}}},
    "two policy ranks": {"cluster": {"workers_per_node": 2, "cpus_per_worker": 1, "use_gpus": False}, "env": SUMS},
}


def overlaid(base, changes):
    """Changes on changes: None, which removes a key of the tiny config, is kept."""
    out = dict(base)
    for key, value in changes.items():
        out[key] = overlaid(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


FULL = pytest.mark.full("each starts Ray, an engine and other models; dynamic sampling runs in CI")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "dynamic sampling" else FULL) for case in CASES])
def test_every_algorithm_trains_on_rollouts_of_older_weights_within_the_bound(train, config, tmp_path, case):
    if "loss_fn" in CASES[case]:
        del config["loss_fn"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # where the agent is
    code, output = train(overlaid(config, CASES[case]), environment={"PYTHONPATH": paths}).wait()
    assert code == 0, output
    steps, rollouts = metrics_of(tmp_path), rollouts_of(tmp_path)
    ages = [steps[step].get("staleness/steps_max", 0.0) for step in range(1, STEPS + 1)]
    assert 0 < max(ages) <= 2
    indices = [row["index"] for step in range(1, STEPS + 1) for row in rollouts.get(step, ()) if row["sample"] == 0]
    assert len(indices) >= STEPS
    assert len(indices) == len(set(indices)), "a prompt was trained twice"
    if case == "distillation with answers of the data":
        assert {steps[step]["rollout/sampled"] for step in range(1, STEPS + 1)} == {0.0, 1.0}
    if case == "dynamic sampling":
        assert sum(steps[step]["dynamic_sampling/dropped_groups"] for step in range(1, STEPS + 1)) > 0
