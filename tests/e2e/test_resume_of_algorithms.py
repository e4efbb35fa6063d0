"""For every algorithm, a resumed run equals an uninterrupted one bit for bit, also on two ranks."""

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import MODEL, ROOT, reproducible_metrics_of
from safetensors.torch import load_file

from rl_train.launch.train import train

pytestmark = pytest.mark.slow

PAIRS = {"train": {"dataset_name": "preference", "path": str(ROOT / "examples" / "addition" / "preferences" / "train.jsonl")}}
LABELLED = {"train": {**PAIRS["train"], "split_pairs": True}}
POLICY = {
    "backend": "hf",
    "model_name": str(MODEL),
    "max_total_sequence_length": 16,
    "train_global_batch_size": 8,
    "optimizer": {"kwargs": {"lr": 1.0e-4, "weight_decay": 0.01}},
    "scheduler": {"name": "cosine", "kwargs": {"num_warmup_steps": 2}},
}
SAMPLES = {
    "policy": {**POLICY, "generation": {"backend": "hf", "max_new_tokens": 5}},
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40}},
    "env": {"arithmetic": {"num_workers": 1}},
}
KL = {
    "use_kl_in_reward": True,
    "reference_policy_kl_penalty": 0.05,
    "reference_policy_kl_type": "k1",
    "adaptive_kl": {"target": 0.01, "horizon": 100},
}
RUNS = {
    "sft": {
        "sft": {"global_batch_size": 16},
        "policy": POLICY,
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
    },
    "dpo": {"dpo": {"global_batch_size": 8}, "policy": POLICY, "data": PAIRS},
    "rm": {"rm": {"global_batch_size": 8}, "policy": POLICY, "data": PAIRS},
    "kto": {"kto": {"global_batch_size": 16}, "policy": POLICY, "data": LABELLED},
    "distillation": {
        "distillation": {"num_prompts_per_step": 16, "student_data_fraction": 0.5},
        "loss_fn": {"topk": 4},
        **SAMPLES,
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
        "teacher": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
    },
    "teachers of tasks": {
        "distillation": {"num_prompts_per_step": 16},
        "loss_fn": {"topk": 4},
        "policy": SAMPLES["policy"],
        "data": {
            "mix": {name: {"dataset_name": "arithmetic", "num_samples": 40, "task_name": name} for name in ("one", "two")}
        },
        "teachers": {
            "one": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
            "two": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 24},
        },
    },
    "average": {
        "distillation": {
            "num_prompts_per_step": 16,
            "teacher_prompt": "{expected_answer} {question}",
            "teacher_weights": "average",
            "teacher_decay": 0.8,
        },
        "loss_fn": {"topk": 4},
        **SAMPLES,
        "policy": {**SAMPLES["policy"], "max_total_sequence_length": 32},
    },
    "grpo": {"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}, "loss_fn": KL, **SAMPLES},
    "several turns": {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_rollout_turns": 3},
        **SAMPLES,
        "policy": {**SAMPLES["policy"], "max_total_sequence_length": 64},
        "loss_fn": {"use_importance_sampling_correction": True},
        "data": {"train": {"dataset_name": "guess", "num_samples": 64, "question": "{lowest}-{highest}="}},
        "env": {"guess": {"max_guesses": 3, "higher": "+", "lower": "-", "unreadable": "*"}},
    },
    "ppo": {
        "ppo": {"num_prompts_per_step": 16, "ppo_epochs": 2},
        "loss_fn": KL,
        **SAMPLES,
        "value": POLICY,
    },
}
IN_PROCESS = {"backend": "in_process"}
TWO_RANKS = {"workers_per_node": 2, "cpus_per_worker": 1, "use_gpus": False}
CASES = [
    ("sft", TWO_RANKS),
    ("dpo", TWO_RANKS),
    ("rm", TWO_RANKS),
    ("kto", TWO_RANKS),
    ("distillation", TWO_RANKS),
    ("teachers of tasks", IN_PROCESS),
    ("average", TWO_RANKS),
    ("grpo", IN_PROCESS),
    ("ppo", IN_PROCESS),
    ("several turns", IN_PROCESS),
]
STEPS, STOPPED_AFTER = 4, 2


def weights_of(run, step):
    """Every tensor of a checkpoint, by model and name."""
    files = sorted((run / "checkpoints" / f"step_{step:06d}").glob("*/weights/*.safetensors"))
    assert files
    return {(file.parts[-3], name): tensor for file in files for name, tensor in load_file(file).items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not tensor.equal(other[name])]


FULL = pytest.mark.full("grpo and ppo (test_ppo.py) resume in CI; backends_hf/test_policy_ranks.py resumes two ranks")
ALWAYS = ("grpo",)


@pytest.mark.parametrize(
    ("case", "cluster"),
    [pytest.param(*case, marks=() if case[0] in ALWAYS else FULL) for case in CASES],
    ids=[case for case, _ in CASES],
)
def test_a_resumed_run_equals_an_uninterrupted_run(case, cluster, tmp_path, local_ray):
    algorithm = {"several turns": "grpo", "teachers of tasks": "distillation", "average": "distillation"}.get(case, case)
    config = {
        **RUNS[case],
        algorithm: {**RUNS[case][algorithm], "max_num_steps": STEPS, "seed": 3},
        "cluster": cluster,
        "checkpointing": {"save_period": STOPPED_AFTER, "keep_latest_k": 2},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    whole = train(path, console=False).folder
    # The state after a kill: the checkpoint in the middle, and metrics of steps that will be repeated.
    stopped = tmp_path / "runs" / "stopped"
    middle = Path("checkpoints") / f"step_{STOPPED_AFTER:06d}"
    shutil.copytree(whole / middle, stopped / middle)
    shutil.copy(whole / "metrics.jsonl", stopped)
    resumed = train(path, console=False, resume=str(stopped))
    assert (resumed.folder, resumed.resumed_from) == (stopped, STOPPED_AFTER)
    assert reproducible_metrics_of(tmp_path, "stopped") == reproducible_metrics_of(tmp_path)
    assert differing(weights_of(whole, STEPS), weights_of(stopped, STEPS)) == []
    assert differing(weights_of(whole, STEPS), weights_of(whole, STOPPED_AFTER)), "nothing was learnt in between"
