"""Experts that Transformers stores in one tensor are exported one by one: through shared memory and by reference."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import NLLLossFn
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
MIXTURES = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8, head_dim=8),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.mark.parametrize("transport", [ByReferenceTransport, SharedMemoryTransport], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_engine_samples_with_the_experts_of_the_policy(kind, transport, tmp_path):
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(MIXTURES[kind]()).save_pretrained(tmp_path)
    policy = HuggingFacePolicy(str(tmp_path), optimizer={"kwargs": {"lr": 1e-2}})
    engine = HuggingFaceGeneration(str(tmp_path), max_new_tokens=6)
    # Less than the experts of a layer: a tensor that holds them arrives in pieces.
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, transport, buffer_bytes=2048))
    before = policy.weight_fingerprint()
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    rows = BatchedDataDict(input_ids=ids, input_lengths=torch.full((4,), 12))
    policy.train(BatchedDataDict({**rows, "token_mask": torch.ones(4, 12), "sample_mask": torch.ones(4)}), NLLLossFn())
    assert policy.weight_fingerprint() != before
    sync.sync()
    assert engine.weight_fingerprint() == policy.weight_fingerprint()
    answer = engine.generate(BatchedDataDict(input_ids=ids[:, :4], input_lengths=torch.full((4,), 4)))
    scored = policy.get_logprobs(
        BatchedDataDict(input_ids=answer["output_ids"], input_lengths=answer["unpadded_sequence_lengths"])
    )["logprobs"]
    drawn = answer["logprobs"] != 0
    assert float((scored - answer["logprobs"])[drawn].abs().max()) < 1e-5
    sync.close()
    policy.shutdown()
    engine.shutdown()
