"""The computed time of a step on GPUs: arithmetic by hand, the 6ND rule, layouts, and the table of published figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rl_core.errors import UserError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.plan.planner import plan_memory, resolved
from rl_train.plan.time_plan import GPUS, engine_time, parse_gpu, plan_time

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from plan_vs_published import FIGURES, MODELS, RESULTS, computed, table  # noqa: E402

H100 = GPUS["h100"]
LAYERS, HIDDEN, INNER, VOCAB, KEYS = 32, 4096, 14336, 128256, 1024
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER)
"""Weights of the matrices of Llama-3.1-8B without embedding and head: 6,979,321,856."""
HEAD = HIDDEN * VOCAB


@pytest.fixture
def registry():
    return Registry(discover())


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Llama-3.1-8B"]))
    return str(tmp_path)


def grpo(model, *, gpus=8, nodes=1, policy=None, engine=None, prompts=16, cluster=None):
    """A config of GRPO with 8 rows for each prompt, of 512 + 1,024 tokens."""
    return {
        "cluster": cluster or {"backend": "ray", "num_nodes": nodes, "workers_per_node": gpus, "use_gpus": True},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 512}},
        "env": {"arithmetic": {}},
        "grpo": {"num_prompts_per_step": prompts, "num_generations_per_prompt": 8, "max_num_steps": 1, "val_period": 0},
        "policy": {
            "backend": "hf",
            "model_name": model,
            "precision": "bfloat16",
            "max_total_sequence_length": 1536,
            "train_micro_batch_size": 1,
            "shared_prefix": "off",
            **(policy or {}),
            "generation": {"backend": "vllm", "max_new_tokens": 1024, **(engine or {})},
        },
    }


def plan(config, registry, gpu=H100, **lengths):
    return plan_time(load_config(config, registry=registry, stages=()).run, registry, gpu=gpu, **lengths)


def test_training_takes_the_flops_of_three_passes(model, registry):
    phases = plan(grpo(model), registry).phases
    rows, length, completion = 16 * 8 / 8, 1536, 1024
    forward = rows * (2 * MATRICES * length + 2 * HEAD * completion + 4 * LAYERS * HIDDEN * length * length / 2)
    assert phases["train"] == pytest.approx(3 * forward / (0.4 * 989.4e12))
    weights = MATRICES + 2 * HEAD
    assert phases["train"] == pytest.approx(6 * weights * rows * length / (0.4 * 989.4e12), rel=0.1)  # 6 N D


def test_checkpointing_adds_a_forward_pass_and_adapters_save_the_gradients_of_frozen_weights(model, registry):
    train = plan(grpo(model), registry).phases["train"]
    again = plan(grpo(model, policy={"activation_checkpointing": True}), registry).phases["train"]
    assert again == pytest.approx(4 / 3 * train)
    adapters = plan(grpo(model, policy={"hf_cfg": {"lora": {"rank": 8}}}), registry).phases["train"]
    assert adapters == pytest.approx(2 / 3 * train, rel=0.05)
    assert adapters > 2 / 3 * train  # attention has a whole backward pass


def test_several_optimizer_steps_and_a_reference_policy_add_passes(model, registry):
    once = plan(grpo(model), registry)
    assert set(once.phases) == {"rollout", "refit", "train", "update"}
    assert once.seconds == pytest.approx(sum(once.phases.values()))
    several = plan(grpo(model, policy={"train_global_batch_size": 32}), registry).phases
    assert several["update"] == pytest.approx(4 * once.phases["update"])
    assert several["train"] == pytest.approx(once.phases["train"])
    compared = plan({**grpo(model), "loss_fn": {"reference_policy_kl_penalty": 0.1}}, registry).phases
    assert compared == pytest.approx({**once.phases, "reference": several["score"]})


def test_the_mismatched_rows_of_kto_add_a_scoring_pass_and_memory_for_it(registry):
    runs = {
        name: load_config(ROOT / "examples" / f"{name}_addition.yaml", changes, registry=registry, stages=()).run
        for name, changes in (("kto", ["kto.global_batch_size=64"]), ("dpo", ["dpo.global_batch_size=32"]))
    }
    kto, dpo = (plan_time(runs[name], registry, gpu=H100).phases for name in ("kto", "dpo"))
    assert dpo.keys() == {"reference", "train", "update"}
    assert kto == pytest.approx({**dpo, "score": dpo["reference"], "reference": 2 * dpo["reference"]})
    assert kto["score"] == pytest.approx(kto["train"] / 3)
    memory = {name: plan_memory(run, registry, on_gpu=False, limit=None) for name, run in runs.items()}
    scored = {name: any("score" in process.phases for process in planned.processes) for name, planned in memory.items()}
    assert scored == {"kto": True, "dpo": False}


def test_prompts_that_rows_share_are_computed_once(model, registry):
    policy = {"shared_prefix": "auto", "train_micro_batch_size": 8}
    train, alone = (plan(grpo(model, policy=each), registry).phases["train"] for each in (policy, {}))
    shared = 8 * 1024 + 512
    forward = 2 * (2 * MATRICES * shared + 2 * HEAD * 8 * 1024 + 4 * LAYERS * HIDDEN * shared * 1536 / 2)
    assert train == pytest.approx(3 * forward / (0.4 * 989.4e12))
    assert train < alone


def test_the_gradients_of_eight_gpus_are_summed_by_a_ring(model, registry):
    update, alone = (plan(grpo(model, gpus=gpus), registry).phases["update"] for gpus in (8, 1))
    assert update - alone == pytest.approx(2 * 7 / 8 * 4 * (MATRICES + HEAD) / 450e9)
    two_nodes = plan(grpo(model, nodes=2), registry).phases["update"]
    assert two_nodes - alone == pytest.approx(2 * 15 / 16 * 4 * (MATRICES + HEAD) / 50e9)


def test_a_step_of_sampling_reads_weights_keys_and_values(model, registry):
    run = load_config(grpo(model, gpus=1), registry=registry, stages=()).run
    run = resolved(run, on_gpu=True)
    engine = engine_time(run, registry, H100, run.policy.generation, 0)
    weights = 2 * (MATRICES + 2 * HEAD + (2 * LAYERS + 1) * HIDDEN)
    token = 2 * 2 * LAYERS * KEYS
    read = 0.7 * 3.35e12
    prefill = (2 * MATRICES * 512 + 2 * HEAD + 4 * LAYERS * HIDDEN * 512 * 256) / (0.4 * 989.4e12)
    steps = 1024 * (weights + 8 * (512 + 512) * token) / read
    lengths = {"prompt": 512, "completion": 1024}
    assert engine.seconds(rows=8, prompts=1, **lengths) == pytest.approx(prefill + steps)
    fits = int((0.6 * 80 * 2**30 - weights) / (1536 * token))
    waves = engine.seconds(rows=4 * fits, prompts=1, **lengths) - prefill
    assert waves == pytest.approx(4 * (engine.seconds(rows=fits, prompts=1, **lengths) - prefill))


def test_sampling_ends_with_the_longest_completion(model, registry):
    everything = plan(grpo(model), registry).phases["rollout"]
    half, shorter = (plan(grpo(model), registry, completion=tokens).phases["rollout"] for tokens in (512, 256))
    assert shorter < half < everything < 1.4 * half


def test_the_greedy_rollout_of_remax_is_sampled_like_another_sample_of_the_prompt(model, registry):
    config = grpo(model)
    config["grpo"] |= {"num_generations_per_prompt": 7, "adv_estimator": {"name": "remax"}}
    assert plan(config, registry).phases["rollout"] == plan(grpo(model), registry).phases["rollout"]


def test_a_larger_completion_never_takes_less_time(model, registry):
    times = [plan(grpo(model), registry, prompt=512, completion=tokens).seconds for tokens in (1, 16, 128, 512, 1000, 1024)]
    assert None not in times
    assert times == sorted(times)


def test_lengths_that_are_given_are_limited_by_those_of_the_config(model, registry):
    given = plan(grpo(model), registry, prompt=3, completion=5)
    assert (given.prompt, given.completion) == (3, 5)
    longest = plan(grpo(model), registry, prompt=3000, completion=5000)
    assert (longest.prompt, longest.completion) == (512, 1024)


def test_phases_that_overlap_have_no_sum(model, registry):
    overlapping = {**grpo(model), "rollout": {"max_staleness": 1}, "loss_fn": {"ratio_to": "sampler"}}
    overlapping["policy"]["generation"]["resources"] = {"num_nodes": 1, "workers_per_node": 8}
    step = plan(overlapping, registry)
    assert (step.seconds, set(step.not_predicted)) == (None, {"step"})
    assert "train" in step.phases


@pytest.mark.megatron
def test_more_gpus_never_take_longer_to_train(model, registry):
    megatron = {"backend": "megatron", "megatron_cfg": {"tensor_model_parallel_size": 2}}
    for policy in ({}, {"hf_cfg": {"data_parallel": "fsdp2"}}, megatron):
        times = [plan(grpo(model, gpus=gpus, policy=policy), registry).phases["train"] for gpus in (2, 4, 6, 8)]
        assert times == sorted(times, reverse=True)


@pytest.mark.megatron
def test_parallel_layouts_divide_the_work_and_pipeline_stages_wait(model, registry):
    def trained(**sizes):
        policy = {"backend": "megatron", "megatron_cfg": sizes}
        return plan(grpo(model, policy=policy), registry).phases["train"]

    alone = plan(grpo(model), registry).phases["train"]
    assert trained(tensor_model_parallel_size=4) == pytest.approx(alone)
    assert trained(context_parallel_size=2) == pytest.approx(alone)
    # Each of the 2 copies has 4 stages and 64 microbatches.
    assert trained(pipeline_model_parallel_size=4) == pytest.approx(alone * (1 + 3 / 64))


def test_of_a_mixture_only_the_experts_of_a_token_are_computed(tmp_path, registry):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"]))
    train = plan(grpo(str(tmp_path)), registry).phases["train"]
    tokens = 16 * 8 / 8 * 1536
    assert train == pytest.approx(6 * 3.3e9 * tokens / (0.4 * 989.4e12), rel=0.2)  # 3.3B active parameters, as published


def test_the_engine_of_hf_starts_operations_one_by_one(model, registry):
    run = load_config(grpo(model, gpus=1, engine={"backend": "hf"}), registry=registry, stages=()).run
    run = resolved(run, on_gpu=True)
    engine = engine_time(run, registry, H100, run.policy.generation, 0)
    few, more = (engine.seconds(rows=rows, prompts=1, prompt=8, completion=255) for rows in (1, 8))
    assert few == pytest.approx(10.0, rel=0.01)  # 25.5 tokens per second
    assert more == pytest.approx(few)


def test_quantized_weights_and_backends_without_a_description_are_not_predicted(model, registry, tmp_path):
    run = load_config(grpo(model), registry=registry, stages=()).run
    options = run.policy.hf_cfg.model_copy(update={"load_in_4bit": True})
    quantized = plan_time(
        run.model_copy(update={"policy": run.policy.model_copy(update={"hf_cfg": options})}), registry, gpu=H100
    )
    assert quantized.seconds is None
    assert "quantized" in quantized.not_predicted["passes of policy"]
    server = {"base_url": "http://127.0.0.1:1/v1", "model": "sums", "weight_updates": "vllm"}
    remote = plan(grpo(model, engine={"backend": "openai", "refit_folder": str(tmp_path), "openai_cfg": server}), registry)
    assert "openai" in remote.not_predicted["rollout"]
    assert "train" in remote.phases


def test_names_of_gpus_are_read_and_wrong_ones_are_refused_with_the_list():
    assert parse_gpu(" RTX 4090 ", "--gpu") is GPUS["rtx4090"]
    assert parse_gpu("80GiB", "--gpu") == 80 * 2**30
    with pytest.raises(UserError, match=r"--gpu h1000 is not a known GPU.*a100, .*h100"):
        parse_gpu("h1000", "--gpu")


def test_the_published_table_is_the_one_of_the_results_and_of_the_documentation():
    rows = json.loads(RESULTS.with_suffix(".json").read_text())
    assert list(rows) == list(FIGURES)
    assert RESULTS.with_suffix(".md").read_text().endswith(table(rows))
    page = (ROOT / "docs" / "plan.md").read_text()
    for name, phases in rows.items():
        assert f"| {name} |" in page
        assert f"| {sum(phases.values()) / FIGURES[name].published:.2f} |" in page


@pytest.mark.parametrize("name", ["training, MPT-7B, 8 H100", "sampling, Llama-2-7B, A100, 60 rows"])
def test_published_figures_are_computed_as_committed(name, tmp_path, registry):
    committed = json.loads(RESULTS.with_suffix(".json").read_text())[name]
    assert computed(FIGURES[name], tmp_path, registry) == pytest.approx(committed)


@pytest.mark.slow
@pytest.mark.megatron
def test_all_published_figures_are_computed_as_committed(tmp_path, registry):
    rows = {name: computed(figure, tmp_path, registry) for name, figure in FIGURES.items()}
    assert rows == {
        name: pytest.approx(phases) for name, phases in json.loads(RESULTS.with_suffix(".json").read_text()).items()
    }
