"""Weights of a model with fused tensors under their checkpoint names: equal to what Transformers saves, as views."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rl_backends_base.checkpoint_names import CheckpointNames
from rl_core.errors import WeightSyncError
from rl_core.weights.manifest import manifest_of, weights_of

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
FUSED = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=8, num_experts_per_tok=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=8, num_experts_per_tok=2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),
}
PLAIN = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
}


def make(kind):
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config({**FUSED, **PLAIN}[kind]())


def names_of(model):
    return CheckpointNames(model, {name: tensor.shape for name, tensor in weights_of(model).items()})


@pytest.mark.parametrize("kind", [*FUSED, *PLAIN])
def test_names_and_values_equal_those_written_by_transformers(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (model, loaded):
        names, live = names_of(each), weights_of(each)
        found = names.view_by_name(live)
        assert found.keys() == written.keys() == names.manifest(manifest_of(live)).keys()
        assert list(found) == list(names.manifest(manifest_of(live))) == [name for name, _ in names.split(live.items())]
        assert len(found) == len(written)
        for name, tensor in written.items():
            assert torch.equal(found[name], tensor), name
            assert names.manifest(manifest_of(live))[name] == (tuple(tensor.shape), "float32")


@pytest.mark.parametrize("kind", FUSED)
def test_a_folder_that_was_written_fused_gives_the_same_names(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(names_of(loaded).view_by_name(weights_of(loaded))) == list(names_of(model).view_by_name(weights_of(model)))


def test_values_copied_into_a_view_are_used_by_the_model():
    model, other = make("qwen3_moe"), make("qwen3_moe")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        views = names_of(model).view_by_name(weights_of(model))
        for name, tensor in names_of(other).split(weights_of(other).items()):
            views[name].copy_(tensor)
        ids = torch.arange(10)[None]
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_exporting_some_names_reads_only_their_tensors():
    model = make("mixtral")
    names, live = names_of(model), weights_of(model)
    some = [
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        "model.norm.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    ]
    holders = names.containers(some)
    assert holders == ["model.layers.1.mlp.experts.gate_up_proj", "model.norm.weight"]
    found = dict(names.split(((name, live[name]) for name in holders), some))
    assert found.keys() == set(some)
    assert torch.equal(found[some[0]], live[holders[0]][2, 24:])


def test_views_of_one_tensor_are_exported_as_that_tensor():
    model = make("qwen3_moe")
    names, live = names_of(model), weights_of(model)
    views = names.view_by_name(live)
    some = {name: views[name] for name in list(views)[5:20]}
    for holder, tensor in names.merge(some).items():
        assert tensor.data_ptr() == live[holder].data_ptr()
        assert torch.equal(tensor, live[holder])


def test_tensors_in_separate_memory_cannot_be_shared_by_reference():
    model = make("qwen3_moe")
    names = names_of(model)
    apart = {name: view.clone() for name, view in names.view_by_name(weights_of(model)).items()}
    with pytest.raises(WeightSyncError, match=r"separate tensor in the policy but a part of .*refit_transport: shared_memory"):
        names.merge(apart)


def test_tensors_of_a_dense_model_are_exported_unchanged():
    model = make("qwen3")
    live = weights_of(model)
    views = names_of(model).view_by_name(live)
    assert all(views[name] is tensor for name, tensor in live.items())
