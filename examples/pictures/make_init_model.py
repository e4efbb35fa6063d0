"""Writes the untrained model of the pictures example: a Qwen2.5-VL with about half a million random parameters.

python examples/pictures/make_init_model.py runs/pictures-init
rlcore train examples/sft_pictures.yaml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from shapes import COLORS, SIDES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

PAD, EOS = "<|endoftext|>", "<|im_end|>"
OPENS, CLOSES, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template without roles: a question is its picture and its text, an answer its content and eos."""
PATCH = 8
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": (2 * PATCH) ** 2,
    "max_pixels": 128**2,
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Settings of the image processor: a square of 16 x 16 pixels is a token."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and pieces of the example's questions and answers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[PAD, EOS], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    bpe.train_from_iterator([*COLORS, *(f"What color is the {side} shape?" for side in SIDES)], trainer)
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in (OPENS, CLOSES, IMAGE, VIDEO)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, model_max_length=256, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """The model, float32: two layers that see and two that read."""
    torch.manual_seed(seed)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (("image", IMAGE), ("video", VIDEO), ("vision_start", OPENS), ("vision_end", CLOSES))
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,  # of 32 values, the smallest size that vLLM supports on a CPU
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 2,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 96,
        "initializer_range": 0.08,
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Write the untrained model of the pictures example.")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=chosen.seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(chosen.folder)
    tokenizer.save_pretrained(chosen.folder)
    (chosen.folder / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters in {chosen.folder}")
