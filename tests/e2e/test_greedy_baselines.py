"""ReMax with real engines: greedy rollouts are sampled and scored with the others, and only their rewards reach training."""

import json

import pytest
import torch
from e2e_runs import MODEL, ROOT, TINY, merged, metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.errors import UserError
from rl_train.launch.train import train
from rl_train.metrics.jsonl import read_jsonl

REMAX = {
    "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 1, "max_num_steps": 2},
    "policy": {"train_global_batch_size": 16},
    "data": {"train": {"num_samples": 64, "min_digits": 2}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
BASELINE = {"grpo": {"adv_estimator": {"name": "remax"}}}
TWO = {"grpo": {"num_generations_per_prompt": 2}}


@pytest.fixture
def run(tmp_path):
    """Trains a changed config in this process; returns its metrics by step, and the rollouts of the first step."""

    def start(name, *changes, base=TINY, **options):
        config = merged(base, REMAX)
        for change in (*changes, {"logger": {"log_dir": str(tmp_path / "runs")}}):
            config = merged(config, change)
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
        folder = train(tmp_path / f"{name}.yaml", resume="never", console=False, **options).folder
        return metrics_of(tmp_path, name), read_jsonl(folder / "rollouts" / "step_000001.jsonl")

    return start


def greedy_answer(model, tokenizer, prompt):
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    answer = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def test_the_baseline_is_the_reward_of_the_greedy_answer_and_only_samples_are_trained(run, tmp_path):
    steps, rows = run("remax", BASELINE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    for row in rows:
        is_right = greedy_answer(model, tokenizer, row["prompt"]) == str(row["expected_answer"])
        assert row["baseline_reward"] == float(is_right), row["prompt"]
        assert row["advantage"] == row["reward"] - row["baseline_reward"]
    assert {row["baseline_reward"] for row in rows} == {0.0, 1.0}
    assert len(rows) == steps[1]["rollout/rows"] == 16
    assert steps[1]["tokens/trained"] == sum(len(row["tokens"]) for row in rows)
    assert steps[1]["advantage/baseline"] == sum(row["baseline_reward"] for row in rows) / 16
    assert steps[1]["reward/equal_groups_frac"] == sum(row["advantage"] == 0 for row in rows) / 16
    assert steps[1]["grad_norm"] > 0

    # The samples of a prompt do not depend on whether there is a greedy rollout.
    _, others = run("grpo", TWO)
    assert [row["tokens"] for row in others[::2]] == [row["tokens"] for row in rows]

    replayed, _ = run("replayed", BASELINE, replay=tmp_path / "runs" / "remax")
    assert replayed[2]["loss"] == pytest.approx(steps[2]["loss"], rel=1e-6)
    with pytest.raises(UserError, match="greedy rollout of each prompt, which these rollouts do not have"):
        run("refused", BASELINE, TWO, replay=tmp_path / "runs" / "grpo")


@pytest.mark.slow
@pytest.mark.ray
def test_an_asynchronous_run_samples_the_same_baselines(run, local_ray):
    steps, rows = run("synchronous", BASELINE, TWO)
    ahead = {"rollout": {"max_staleness": 1, "order": "exact"}, "loss_fn": {"ratio_to": "sampler"}}
    cluster = {"cluster": {"backend": "ray", "workers_per_node": 1, "use_gpus": False}}
    later, same = run("asynchronous", BASELINE, TWO, ahead, cluster)
    for key in ("tokens", "reward", "baseline_reward", "advantage"):
        assert [row[key] for row in same] == [row[key] for row in rows], key
    assert later[1]["tokens/trained"] == steps[1]["tokens/trained"]
    assert later[2]["staleness/steps_max"] == 1


@pytest.mark.slow
def test_remax_with_dynamic_sampling_and_several_turns_keeps_groups_that_differ_from_their_greedy_rollout(run):
    calculator = {
        "grpo": {"num_generations_per_prompt": 2, "use_dynamic_sampling": True, "max_num_steps": 1},
        "policy": {
            "model_name": str(ROOT / "examples" / "tools" / "model"),
            "max_total_sequence_length": 192,
            "generation": {"max_new_tokens": 40},
        },
        "data": {"train": {"task_name": "tools", "style": "chat", "operations": ["*"], "min_digits": 2, "max_digits": 2}},
    }
    tools = {"env": {"tools": {"tools": ["calculator"], "max_tool_turns": 2, "call_timeout_s": 5}}}
    steps, rows = run("tools", BASELINE, calculator, tools, base={**TINY, "env": {}})
    groups = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    assert len(groups) == 16
    assert all(any(row["reward"] != row["baseline_reward"] for row in group) for group in groups)
    assert any(group[0]["reward"] == group[1]["reward"] for group in groups), "GRPO would drop such a group"
    assert steps[1]["advantage/equal_group_frac"] == 0
    assert steps[1]["dynamic_sampling/dropped_groups"] > 0
    assert max(row["turns"] for row in rows) == 2
    assert steps[1]["tokens/trained"] == sum(len(row["tokens"]) for row in rows)
