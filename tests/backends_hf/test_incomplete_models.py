"""A model whose files lack tensors, or have others than its config describes, is refused by everything that loads it."""

from __future__ import annotations

import json
import logging
import shutil

import model_folders
import pytest
import torch
import transformers
from command_line import rlcore
from huggingface_hub import constants

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig
from rl_backends_hf.model import load_model
from rl_core.data.loaded_model import check_files
from rl_core.errors import CheckpointError, UserError, WorkerError
from rl_envs.reward_model import load_reward_model

LAYER = "model.layers.1.mlp.down_proj.weight"
DAMAGES = {
    "missing head": (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight: missing"),
    "missing layer": (lambda tensors: tensors.pop(LAYER), f"{LAYER}: missing"),
    "misshapen": (
        lambda tensors: tensors.update({LAYER: torch.ones(64, 64)}),
        f"{LAYER}: has shape (64, 64), but the model needs (64, 96)",
    ),
    "larger vocabulary": (
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(400, 64)}),
        "model.embed_tokens.weight: has shape (400, 64), but the model needs (320, 64)",
    ),
    "bias": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "model.layers.0.self_attn.q_proj.bias: unused, although the model has other tensors of this layer",
    ),
}


@pytest.fixture(params=DAMAGES)
def damaged(request, tmp_path):
    """A folder, and the problem that errors name."""
    folder = model_folders.make(tmp_path / "model")
    change, problem = DAMAGES[request.param]
    model_folders.edit_weights(folder, change)
    return str(folder), problem


def config(folder, **changes):
    policy = {"backend": "hf", "model_name": str(folder), "max_total_sequence_length": 32, **changes}
    train = {"dataset_name": "jsonl", "path": str(folder / "rows.jsonl"), "response_key": "answer", "output_key": None}
    (folder / "rows.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n' * 2)
    path = folder / "run.yaml"
    path.write_text(json.dumps({"sft": {"global_batch_size": 2}, "policy": policy, "data": {"train": train}}))
    return path


def test_everything_that_loads_a_model_names_the_file_and_the_tensor(damaged):
    name, problem = damaged
    readers = {
        "policy": lambda: HuggingFacePolicy(name).wait_ready(),
        "engine": lambda: HuggingFaceGeneration(model_name=name).wait_ready(),
        "headers": lambda: check_files(name),
        "value model": lambda: load_model(name, options=HFModelConfig(), dtype=torch.float32, head="scalar"),
    }
    if problem.startswith("lm_head"):
        readers.pop("value model")()  # has another head
    for reader, load in readers.items():
        with pytest.raises((UserError, WorkerError)) as error:
            load()
        text = str(error.value)
        assert f"The tensors of {name}/model.safetensors are not those of its config.json" in text, reader
        assert f"\n  {problem}\n" in text, reader
        assert "Restore the files" in text, reader


def test_the_deep_check_of_a_config_reports_it(damaged, tmp_path):
    _, problem = damaged
    found = rlcore("validate", "--deep", config(tmp_path / "model"))
    assert found.returncode == 2
    assert f"policy.model_name: The tensors of {tmp_path}/model/model.safetensors" in found.stdout + found.stderr
    assert problem in found.stdout + found.stderr


def test_a_field_of_the_config_that_explains_the_tensor_makes_it_valid(tmp_path):
    folder = model_folders.make(tmp_path / "model")
    names = [f"{layer}.self_attn.{each}_proj.bias" for layer in ("model.layers.0", "model.layers.1") for each in "qkvo"]
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    biases = {name: torch.ones(sizes[name.split(".")[-2][0]]) for name in names}
    model_folders.edit_weights(folder, lambda tensors: tensors.update(biases))
    overrides = {"hf_cfg": {"config_overrides": {"attention_bias": True}}}
    assert rlcore("validate", "--deep", config(folder)).returncode == 2
    assert rlcore("validate", "--deep", config(folder, **overrides)).returncode == 0
    policy = HuggingFacePolicy(str(folder), config_overrides={"attention_bias": True})
    assert dict(policy.group.worker.iter_weights())[names[0]].eq(1).all()


def test_a_resumed_checkpoint_without_a_tensor_leaves_the_policy_unchanged(damaged, tmp_path):
    _, problem = damaged
    policy = HuggingFacePolicy(str(model_folders.make(tmp_path / "whole")))
    before = policy.weight_fingerprint()
    with pytest.raises(CheckpointError) as error:
        policy.group.worker.load_weights(tmp_path / "model")
    assert problem in str(error.value)
    assert policy.weight_fingerprint() == before


def test_a_head_that_tying_replaces_is_not_missing_but_one_that_differs_is_refused(tmp_path, monkeypatch):
    for form in ("tied", "tied with both tensors"):
        load_model(str(model_folders.make(tmp_path / form, form)), options=HFModelConfig(), dtype=torch.float32)
        check_files(str(tmp_path / form))
    model_folders.edit_weights(tmp_path / form, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(WorkerError, match=r"differs from .*, although `tie_word_embeddings` is true"):
        HuggingFacePolicy(str(tmp_path / form)).wait_ready()
    with pytest.raises(UserError, match=r"differs from .*, although `tie_word_embeddings` is true"):
        check_files(str(tmp_path / form))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(tmp_path / form, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    with pytest.raises(UserError, match=r"differs from .*, although `tie_word_embeddings` is true"):
        check_files("acme/tiny")


def test_tensors_that_published_models_have_in_addition_are_named_once_and_not_an_error(tmp_path, caplog):
    folder = str(model_folders.make(tmp_path / "model", "extra tensors"))
    transformers_log = logging.getLogger("transformers")  # does not propagate
    transformers_log.addHandler(caplog.handler)
    try:
        load_model(folder, options=HFModelConfig(), dtype=torch.float32)
    finally:
        transformers_log.removeHandler(caplog.handler)
    [message] = caplog.messages
    assert message.startswith(f"{folder} has 9 tensors that a LlamaForCausalLM does not use, such as model.layers.2.")


def test_a_classifier_without_its_head_is_refused_although_a_causal_lm_gets_a_new_one(tmp_path):
    folder = tmp_path / "classifier"
    causal = model_folders.make(tmp_path / "causal")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1)
    model.save_pretrained(folder)
    check_files(str(causal), head="scalar")
    check_files(str(folder), head="scalar")
    model_folders.edit_weights(folder, lambda tensors: tensors.pop("score.weight"))
    for load in (
        lambda: load_reward_model(str(folder), dtype=torch.float32),
        lambda: load_model(str(folder), options=HFModelConfig(), dtype=torch.float32, head="scalar"),
        lambda: check_files(str(folder), head="scalar"),
    ):
        with pytest.raises(UserError, match=r"score\.weight: missing"):
            load()


def test_a_missing_expert_is_named_by_the_tensor_that_it_is_joined_to(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=2, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    model_folders.edit_weights(tmp_path, lambda tensors: tensors.pop(expert))
    for load in (
        lambda: load_model(str(tmp_path), options=HFModelConfig(), dtype=torch.float32),
        lambda: check_files(str(tmp_path)),
    ):
        with pytest.raises(UserError, match=r"experts\.gate_up_proj: tensors that are joined to it are missing"):
            load()


def test_shards_and_truncated_files_are_refused_too(parts, tmp_path):
    folder = model_folders.make(tmp_path / "model", "sharded")
    check_files(str(folder))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WorkerError, match="incomplete"):
        HuggingFacePolicy(str(folder)).wait_ready()
    found = rlcore("validate", "--deep", config(folder))
    assert found.returncode == 2
    assert "incomplete or corrupt" in found.stdout + found.stderr
    shutil.rmtree(folder)
