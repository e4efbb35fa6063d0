"""A teacher that is the moving average of the policy's weights: its weights, checkpoints and runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backends_hf import HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.supervised import NLLLossFn
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
ROWS = BatchedDataDict(
    input_ids=torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 0, 0]]),
    input_lengths=torch.tensor([6, 4]),
    token_mask=torch.tensor([[0.0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]),
    sample_mask=torch.ones(2),
)
LORA = {"rank": 2, "target_modules": "all-linear"}


def policy_of(model=MODEL, **section):
    optimizer = {"kwargs": {"lr": 0.02, "weight_decay": 0.0}}
    return HuggingFacePolicy(str(model), max_total_sequence_length=16, optimizer=optimizer, **section)


def weights_of(policy, folder):
    policy.save_checkpoint(folder / "weights")
    [file] = (folder / "weights").glob("*.safetensors")
    return {name: tensor.double() for name, tensor in load_file(file).items()}


def scores(policy):
    return policy.get_logprobs(ROWS)["logprobs"]


def averaged_scores(policy):
    policy.average_weights()
    found = scores(policy)
    policy.average_weights()
    return found


def test_the_average_is_that_of_a_float64_loop_and_the_policy_keeps_its_weights(tmp_path):
    policy, decay = policy_of(), 0.7
    average = weights_of(policy, tmp_path / "0")
    assert averaged_scores(policy).equal(scores(policy))  # it starts with the weights
    for step in range(1, 4):
        policy.train(ROWS, NLLLossFn())
        policy.average_weights(decay)
        now = weights_of(policy, tmp_path / f"{step}")
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    [file] = tmp_path.glob("*.safetensors")
    save_file({name: tensor.float() for name, tensor in average.items()}, file, metadata={"format": "pt"})
    before, fingerprint = scores(policy), policy.weight_fingerprint()
    found = averaged_scores(policy)
    # float32 against float64: three updates round each weight by at most 3 * 2^-24 of its size.
    torch.testing.assert_close(found, scores(policy_of(tmp_path, frozen=True)), atol=2e-5, rtol=0)
    assert (found - before).abs().max() > 0.1
    assert scores(policy).equal(before)
    assert policy.weight_fingerprint() == fingerprint


@pytest.mark.parametrize(
    "section",
    [{"precision": "float32"}, {"precision": "bfloat16"}, {"precision": "bfloat16", "hf_cfg": {"lora": LORA}}],
    ids=["float32", "bfloat16", "lora"],
)
def test_a_policy_from_a_checkpoint_continues_the_average_bit_for_bit(tmp_path, section):
    policy = policy_of(**section)
    for _ in range(2):
        policy.train(ROWS, NLLLossFn())
        policy.average_weights(0.5)
    policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    resumed = policy_of(**section)
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    for each in (policy, resumed):
        each.train(ROWS, NLLLossFn())
        each.average_weights(0.5)
    assert averaged_scores(resumed).equal(averaged_scores(policy))
    assert not averaged_scores(policy).equal(scores(policy))


def test_small_updates_are_not_lost_in_the_rounding_of_bfloat16():
    policy, decay = policy_of(precision="bfloat16"), 0.999
    start = averaged_scores(policy)
    policy.train(ROWS, NLLLossFn())
    for _ in range(3000):  # 1 - 0.999^3000 = 95% of the way; each update alone is far below half a bfloat16 step
        policy.average_weights(decay)
    end, moved = scores(policy), averaged_scores(policy)
    assert (end - start).abs().max() > 0.1
    assert (moved - end).abs().max() < 0.2 * (end - start).abs().max()


def config_of(folder, name, **distillation):
    return {
        "distillation": {
            "num_prompts_per_step": 8,
            "max_num_steps": 3,
            "teacher_weights": "average",
            "teacher_decay": 0.9,
            "teacher_prompt": "{question}",
            **distillation,
        },
        "loss_fn": {"topk": 4},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 32,
            "generation": {"backend": "hf", "max_new_tokens": 5},
            "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 5.0}},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 16}},
        "env": {"arithmetic": {}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 2},
        "logger": {"log_dir": str(folder / "runs"), "run_name": name},
    }


def trained(folder, name, **distillation):
    (folder / f"{name}.json").write_text(json.dumps(config_of(folder, name, **distillation)))
    train(folder / f"{name}.json", console=False)
    steps = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["distillation/kl_forward"] for line in steps]


def test_the_teacher_follows_the_student_by_the_decay_and_a_resumed_run_repeats_it(tmp_path):
    prompt = {"teacher_prompt": "{expected_answer} {question}"}
    whole = trained(tmp_path, "whole", **prompt)
    trained(tmp_path, "resumed", **prompt, max_num_steps=2)
    assert trained(tmp_path, "resumed", **prompt) == whole
    # With the student's prompt, the teacher is the student at first, and lags behind what weight decay does to it.
    slow, fast = (trained(tmp_path, f"{decay}", teacher_decay=decay) for decay in (0.9, 0.1))
    assert abs(slow[0]) < 1e-5
    assert slow[2] > 3 * fast[2] > 0
