"""The memory that `rlcore plan` predicts for an engine of vLLM."""

import pytest
import transformers

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.planned_memory import EngineMemory
from rl_core.errors import NotSupportedError

SHAPE = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}


def planned(folder, *, tied):
    """Bytes by phase and part, and the number of weights, of which the embeddings are 160 x 32."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    section = {"model_name": str(folder), "max_new_tokens": 16, "vllm_cfg": {"precision": "float32", "kv_cache_gib": 0.5}}
    phases = EngineMemory(VllmConfig(**section)).by_phase(rows=8, prompt=8, on_gpu=False, limit=None, shares_weights=False)
    return phases, sum(parameter.numel() for parameter in model.parameters())


def test_a_refit_on_a_cpu_needs_the_layers_twice(tmp_path):
    phases, weights = planned(tmp_path, tied=False)
    assert phases["held"] == {"weights": 4 * weights, "packed output layer": 0, "keys and values": 2**29}
    assert phases["refit"] == {"new weights": 4 * (weights - 160 * 32)}


def test_a_tied_output_layer_is_packed_on_a_cpu(tmp_path):
    phases, _ = planned(tmp_path, tied=True)
    assert phases["held"]["packed output layer"] == 4 * 160 * 32


def section_of(folder, config):
    config.save_pretrained(folder)
    return EngineMemory(VllmConfig(model_name=str(folder), max_new_tokens=16, vllm_cfg={"tensor_parallel_size": 2}))


def test_on_gpus_each_process_keeps_the_latents_of_latent_attention(tmp_path):
    """DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.4: the latent and the rotated key of all heads."""
    sizes = {
        **SHAPE,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
    }
    planner = section_of(tmp_path, transformers.DeepseekV3Config(**sizes, n_group=1, topk_group=1, num_experts_per_tok=2))
    assert planner.decoding(rows=4, length=16, limit=2**30)["token"] == 2 * (24 + 8) * 2


def test_how_many_rows_of_a_recurrent_model_fit_into_the_cache_is_not_predicted(tmp_path):
    planner = section_of(tmp_path, transformers.MambaConfig(vocab_size=160, hidden_size=32, num_hidden_layers=2, state_size=8))
    with pytest.raises(NotSupportedError, match="recurrent layers"):
        planner.decoding(rows=4, length=16, limit=2**30)
    assert any("recurrent states" in left_out for left_out in planner.not_counted())


def test_types_of_layers_that_the_cache_of_transformers_does_not_know_are_attention(tmp_path):
    planner = section_of(tmp_path, transformers.DeepseekV4Config())
    assert not any("recurrent states" in left_out for left_out in planner.not_counted())
