"""The memory that `rlcore plan` predicts for an engine of vLLM on CPUs."""

import transformers

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.planned_memory import EngineMemory

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
