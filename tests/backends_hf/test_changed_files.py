"""Weights of a run do not change with the files that they were loaded from."""

from __future__ import annotations

import os

import model_folders
import pytest
import torch
import transformers

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig
from rl_backends_hf.model import load_model
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_envs.reward_model import load_reward_model


def overwrite(folder):
    """Write other numbers into the second half of the weights, without another file or another size."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(os.urandom(path.stat().st_size - file.tell()))


@pytest.mark.parametrize(
    ("form", "device_map"), [("untied", None), ("untied", "cpu"), ("tied", None), ("sharded", None), ("bin", None)]
)
def test_a_model_on_the_cpu_keeps_its_weights(tmp_path, form, device_map):
    folder = model_folders.make(tmp_path / "model", form)
    model = load_model(str(folder), options=HFModelConfig(device_map=device_map), dtype=torch.float32)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    overwrite(folder)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert tied == (form == "tied")


def test_policy_reference_and_engine_keep_their_weights(tmp_path, parts):
    folder, rows = model_folders.make(tmp_path / "model"), parts.make_rows()
    prompts = BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths")})
    policy, engine = HuggingFacePolicy(str(folder)), HuggingFaceGeneration(model_name=str(folder), max_new_tokens=4)
    calls = (policy.get_logprobs, policy.get_reference_policy_logprobs, lambda data: engine.generate(data, greedy=True))
    before = [call(prompts) for call in calls]
    overwrite(folder)
    for call, expected in zip(calls, before, strict=True):
        found = call(prompts)
        assert all(torch.equal(found[key], expected[key]) for key in found if isinstance(found[key], torch.Tensor))


def test_a_reward_model_keeps_its_weights(tmp_path):
    causal = model_folders.make(tmp_path / "causal")
    folder = tmp_path / "reward"
    transformers.AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1).save_pretrained(folder)
    model = load_reward_model(str(folder), dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    overwrite(folder)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
