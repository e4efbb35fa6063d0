"""Tiny random Transformers models, rows, a loss, and the reference results, computed by Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import policy_cases
import torch
import transformers
from policy_cases import (
    NLL,
    SGD,
    TINY_SHAPE,
    counts_of,
    largest_relative_error,
    make_context,
    plain_distributions,
    plain_logprobs,
    plain_loss,
)

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction

__all__ = [
    "NLL",
    "SGD",
    "counts_of",
    "largest_relative_error",
    "make_context",
    "plain_distributions",
    "plain_logprobs",
    "plain_loss",
]

VOCAB_SIZE = 161
"""Odd, so that the vocabulary is padded wherever it is divided."""

_SHAPE = {**TINY_SHAPE, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 4}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MIXTURE = {"num_experts_per_tok": 2}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**{**_SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE,
        **_MIXTURE,
        tie_word_embeddings=False,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "qwen3-moe-raw": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE,
        **_MIXTURE,
        tie_word_embeddings=False,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=24,
        norm_topk_prob=False,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, **_MIXTURE, tie_word_embeddings=False, num_local_experts=4, sliding_window=None
    ),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, tie_word_embeddings=False, sliding_window=None),
    # Four heads of 16 on a hidden size of 32, as in Gemma 7B; embeddings are scaled by the root of 32.
    "gemma": lambda: transformers.GemmaConfig(**_SHAPE, tie_word_embeddings=True, head_dim=16),
}
KINDS = tuple(_CONFIGS)


VALUE_KINDS = ("llama-tied", "qwen3", "qwen3-moe")
"""Of these there is also a model with a scalar head, under `KIND-value`."""


def make_value_model(kind: str, folder: Path) -> None:
    """Write a tiny float32 model with a scalar head."""
    with torch.random.fork_rng():
        torch.manual_seed(47 + KINDS.index(kind))
        config = _CONFIGS[kind]()
        config.num_labels = 1
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def make_model(kind: str, folder: Path) -> None:
    """Write a tiny float32 model of the kind, with norms that are not all ones and biases that are not all zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(11 + KINDS.index(kind))
        model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)


class SquaredError(LossFunction):
    """Half the squared distance of each value to a target of the row, weighted by the token's position."""

    required_keys = frozenset({"weights"})

    def __call__(self, values, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = squared_error(values, mask, data["weights"]) / global_valid_toks
        return loss, {"mse": loss.detach()}


class WeightedCandidates(LossFunction):
    """A weighted sum over candidates and the row's own tokens; all weights differ."""

    required_keys = frozenset({"candidate_weights"})
    candidates_key = "candidates"

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = weighted_candidates(data["candidate_logprobs"], next_token_logprobs, data, mask) / global_valid_toks
        untrained = (data["candidate_logprobs"] * (1 - mask).unsqueeze(-1)).abs().sum()
        return loss, {"untrained": untrained.detach()}


def weighted_candidates(of_candidates, own, rows, mask):
    """Its sum over the rows."""
    return (((of_candidates * rows["candidate_weights"]).sum(-1) + 0.5 * own) * mask).sum()


K = 5
"""Candidates a position."""


def make_candidates(num_rows: int = 8, width: int = 21) -> BatchedDataDict:
    """Rows with candidates: one of them twice, and the row's own token among them."""
    rows, generator = make_rows(num_rows, width), torch.Generator().manual_seed(13)
    rows["candidates"] = torch.randint(0, VOCAB_SIZE, (num_rows, width, K), generator=generator)
    rows["candidates"][..., 1] = rows["candidates"][..., 0]
    rows["candidates"][..., 2] = rows["input_ids"]
    rows["candidate_weights"] = torch.randn(num_rows, width, K, generator=generator)
    return rows


def squared_error(values, mask, targets):
    """Its sum over the rows."""
    # Depends only on the position in the row: a microbatch may be cut to the width of its rows.
    place = torch.arange(values.shape[1]) / 32
    return (0.5 * (values - targets.unsqueeze(1)) ** 2 * mask * (1 + place)).sum()


def plain_values(folder, rows):
    """The reference: backbone and head of Transformers over every row alone, [B, T]; and the model, for its gradients."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    columns = []
    for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        hidden = model.base_model(ids[None, :length], use_cache=False).last_hidden_state[0]
        columns.append(torch.nn.functional.pad(model.score(hidden)[:, 0], (0, len(ids) - length)))
    return torch.stack(columns), model


def make_rows(num_rows: int = 8, width: int = 21, *, seed: int = 5) -> BatchedDataDict:
    """Rows for these models."""
    return policy_cases.make_rows(num_rows, width, seed=seed, vocab_size=VOCAB_SIZE)


def make_prompts() -> BatchedDataDict:
    """Three prompts of unequal lengths, each with a different limit."""
    ids = torch.tensor([[5, 9, 11, 0, 0], [7, 8, 0, 0, 0], [60, 61, 62, 63, 64]])
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([3, 2, 5]), max_new_tokens=torch.tensor([4, 2, 3]))


def plain_completions(model, prompts) -> list[list[int]]:
    """The reference: prompt and greedy completion of each row, by Transformers."""
    rows = []
    for ids, length, limit in zip(prompts["input_ids"], prompts["input_lengths"], prompts["max_new_tokens"], strict=True):
        out = model.generate(ids[None, :length], do_sample=False, max_new_tokens=int(limit), eos_token_id=2, pad_token_id=0)
        rows.append(out[0].tolist())
    return rows


FLAT_ADAM = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e12, "eps": 1e8, "weight_decay": 0.0}}
"""The same step, 1e4 times the gradient, by Adam: its first is lr * g / (|g| + eps)."""


def plain_model(folder) -> torch.nn.Module:
    """The model by Transformers, float32, plain attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def checkpoint_weights(model) -> dict[str, torch.Tensor]:
    """The model's weights under their checkpoint names, with separate experts."""
    found = checkpoint_tensors(model.config, model.state_dict())
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


def checkpoint_gradients(model) -> dict[str, torch.Tensor]:
    """The model's gradients, likewise."""
    return checkpoint_tensors(model.config, {name: parameter.grad for name, parameter in model.named_parameters()})


def checkpoint_tensors(config, tensors) -> dict[str, torch.Tensor]:
    """Renames tensors from model names to checkpoint names."""
    found = {}
    for name, tensor in tensors.items():
        found.update(_experts_apart(config, name, tensor))
    return found


def _experts_apart(config, name, tensor):
    block = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}.get(
        config.model_type, ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    if config.model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    base, _, leaf = name.rpartition(".experts.")
    if leaf == "gate_up_proj":
        for expert, both in enumerate(tensor):
            gate, up = both.chunk(2)
            yield f"{base}.experts.{expert}.{block[1]}.weight", gate
            yield f"{base}.experts.{expert}.{block[2]}.weight", up
    elif leaf == "down_proj":
        for expert, down in enumerate(tensor):
            yield f"{base}.experts.{expert}.{block[3]}.weight", down
    else:
        yield name, tensor
