"""Tiny random models of several families, a policy that takes steps, and log-probabilities by a plain forward pass."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Olmo2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses import NLLLossFn

VOCABULARY, LENGTH = 320, 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on a CPU takes 32, 64, ...
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
FAMILIES = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    # Transformers stores the experts of a layer in one tensor; they are sent to vLLM one by one.
    "qwen3-moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    # vLLM computes it with the classes of Transformers.
    "olmo2": Olmo2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


def make_model(folder, family, **sizes):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(type(FAMILIES[family])(**FAMILIES[family].to_dict() | sizes))
    with torch.no_grad():  # biases and norms start as zeros and ones, so a missing one would not be noticed
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def rows(seed, count=6, width=12):
    generator = torch.Generator().manual_seed(seed)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, VOCABULARY, (count, width), generator=generator),
            "input_lengths": torch.randint(4, width + 1, (count,), generator=generator),
            "sample_seeds": torch.arange(count) + 100 * seed,
        }
    )


def take_step(policy, seed):
    data = rows(seed, count=8, width=24)
    data["token_mask"] = torch.ones_like(data["input_ids"], dtype=torch.float32)
    data["sample_mask"] = torch.ones(8)
    policy.train(data, NLLLossFn())


def plain_logprobs(model, output, temperature=0.8):
    """Log-probability of each sampled token, by a separate forward pass for each row."""
    found = []
    for ids, length, sampled in zip(
        output["output_ids"], output["unpadded_sequence_lengths"], output["generation_lengths"], strict=True
    ):
        tokens = ids[: int(length)].unsqueeze(0)
        with torch.no_grad():
            logits = model(tokens).logits[0].float() / temperature
        scores = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1)
        found.append(scores[-int(sampled) :])
    return torch.cat(found)


def sampled_logprobs(output):
    position = torch.arange(output["output_ids"].shape[1])
    lengths, sampled = output["unpadded_sequence_lengths"], output["generation_lengths"]
    mask = (position >= (lengths - sampled).unsqueeze(1)) & (position < lengths.unsqueeze(1))
    return output["logprobs"][mask]
