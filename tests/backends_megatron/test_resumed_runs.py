"""A resumed multi-rank run equals an uninterrupted one: with a reference, a teacher and a critic."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_train.launch.train import train

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("local_ray")]

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
PAIRS = MODEL.parent / "preferences" / "train.jsonl"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
POLICY = {
    "backend": "megatron",
    "model_name": str(MODEL),
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 16,
    "optimizer": {"kwargs": {"lr": 1.0e-3, "weight_decay": 0.01}},
    "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 10}},
}
SAMPLED = {
    "policy": {**POLICY, "megatron_cfg": TP2, "generation": {"backend": "hf", "max_new_tokens": 5}},
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 64}},
    "env": {"arithmetic": {"num_workers": 1}},
}
RUNS = {
    "dpo in bfloat16": {
        "dpo": {"global_batch_size": 16, "seed": 3},
        # What is published is rounded, so a resume needs the float32 weights behind it.
        "policy": {**POLICY, "precision": "bfloat16", "megatron_cfg": {**PP2, "use_distributed_optimizer": True}},
        "data": {"train": {"dataset_name": "preference", "path": str(PAIRS)}},
    },
    "distillation": {
        **SAMPLED,
        "distillation": {"num_prompts_per_step": 16, "seed": 3, "val_at_start": False, "val_at_end": False},
        "loss_fn": {"topk": 8},
        "teacher": {**{key: POLICY[key] for key in ("backend", "max_total_sequence_length")}, "megatron_cfg": PP2},
    },
    "ppo": {
        **SAMPLED,
        "ppo": {"num_prompts_per_step": 16, "seed": 3, "ppo_epochs": 2},
        "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.05},
        "value": {**POLICY, "megatron_cfg": PP2},
    },
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The model of the quickstart with its last norm disturbed, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    name = "model.norm.weight"
    tensors[name] = tensors[name] * (1 + 0.2 * torch.randn(tensors[name].shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(folder, config, resume):
    """The steps of a three-step run that is saved after the second."""
    algorithm = next(name for name in ("dpo", "distillation", "ppo") if name in config)
    whole = {
        **config,
        algorithm: {**config[algorithm], "max_num_steps": 3},
        "cluster": {"workers_per_node": 2},
        "checkpointing": {"save_period": 2, "keep_latest_k": 5},
        "logger": {"log_dir": str(folder / "runs")},
    }
    (folder / "run.yaml").write_text(json.dumps(whole))
    finished = train(folder / "run.yaml", resume=resume, console=False)
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return finished, {line["step"]: line for line in map(json.loads, lines)}


def weights(folder):
    found = {}
    for file in (folder / "runs" / "run" / "checkpoints" / "step_000003").glob("*/weights/model.safetensors"):
        found |= {f"{file.parts[-3]}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


@pytest.mark.full(
    "test_checkpoints.py resumes ranks bit for bit in both precisions; e2e/test_resume_of_algorithms.py resumes runs"
)
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_run(name, teacher, tmp_path):
    config = dict(RUNS[name])
    if "teacher" in config:
        config["teacher"] = {**config["teacher"], "model_name": str(teacher)}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    _, expected = run(straight, config, "never")
    assert sorted(expected) == [1, 2, 3]
    assert expected[3]["grad_norm"] > 1e-3
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "runs" / "run" / "checkpoints" / "step_000003")
    finished, found = run(stopped, config, "auto")
    assert finished.resumed_from == 2
    assert found.keys() == expected.keys()
    numbers = {key: value for key, value in expected[3].items() if not key.endswith(("_s", "_gib", "/idle_frac"))}
    assert numbers.keys() <= found[3].keys()
    for key, value in numbers.items():
        assert found[3][key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
    before, after = weights(straight), weights(stopped)
    assert after.keys() == before.keys()
    assert {key.split("/")[0] for key in before} == ({"policy", "value"} if "value" in config else {"policy"})
    for key, tensor in before.items():
        assert float((after[key].float() - tensor.float()).abs().max()) <= 1e-6, key
