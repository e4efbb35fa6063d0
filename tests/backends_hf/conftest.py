"""Tiny random models of Transformers, made once a session, as folders that any test may load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

VOCAB_SIZE = 160
KINDS = ("llama", "llama-tied", "qwen2", "qwen3")

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that log-probabilities differ by whole nats, so that a mistake shows.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=8, query_pre_attn_scalar=8
    ),
    "granite": lambda: transformers.GraniteConfig(**_SHAPE, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**_SHAPE, logit_scale=0.25),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a tiny float32 model of the kind: `llama`, `llama-tied`, `qwen2`, `qwen3`, `gemma2`, `granite`, `cohere`."""
    made: dict[str, Path] = {}
    seeds = itertools.count(11)

    def folder(kind: str) -> str:
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(next(seeds))
                model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[kind]())
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return str(made[kind])

    return folder
