"""Writes the untrained quickstart model, a Llama with about a million random parameters, and its tokenizer.

python examples/addition/make_init_model.py runs/addition-init
rlcore train examples/sft_addition.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from make_tokenizer import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(vocabulary_size: int, *, eos_token_id: int, pad_token_id: int, seed: int) -> LlamaForCausalLM:
    """The model, float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=2,  # two wide layers learn sums about twice as fast as four narrow ones of equal size
            num_attention_heads=6,
            num_key_value_heads=6,
            initializer_range=0.06,  # near 1/sqrt(hidden_size); the usual 0.02 wastes a third of the training on a slow start
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Write the untrained quickstart model.")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(
        len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, seed=chosen.seed
    )
    model.save_pretrained(chosen.folder)
    tokenizer.save_pretrained(chosen.folder)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters in {chosen.folder}")
