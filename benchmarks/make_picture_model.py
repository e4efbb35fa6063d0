"""Writes an Idefics 3 with random weights and its processor, for `grpo_vs_trl.py --pictures`.

    python benchmarks/make_picture_model.py /tmp/idefics3
    python benchmarks/grpo_vs_trl.py --model /tmp/idefics3 --pictures 224 --sides trl ours

Its processor is one of the few that Transformers makes without torchvision, so TRL can run it as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

SIDE, PATCH, SCALE = 224, 16, 2
"""Pixels of a picture's side and of a patch's; SCALE x SCALE patches become the feature of a token."""
PICTURE_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_MEAN = [0.5, 0.5, 0.5]
PROCESSOR = {"processor_class": "Idefics3Processor", "image_seq_len": (SIDE // PATCH // SCALE) ** 2}
IMAGES = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_image_splitting": False,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "image_mean": _MEAN,
    "image_std": _MEAN,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<|pad|>", "<end_of_utterance>", "<|im_start|>")
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *alphabet])}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in (*special, *PICTURE_TOKENS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<end_of_utterance>",
        additional_special_tokens=list(PICTURE_TOKENS),
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, layers: int, width: int) -> Idefics3ForConditionalGeneration:
    """The model, float32: a tower and a decoder of equal depth and width."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }
    text = {"model_type": "llama", **sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={**text, **ends, "bos_token_id": None},
            vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=SCALE,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a random vision-language model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="of the tower and of the decoder")
    parser.add_argument("--width", type=int, default=384, help="of both, a multiple of 64")
    given = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=given.layers, width=given.width)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    for name, values in {"preprocessor_config": IMAGES, "processor_config": PROCESSOR}.items():
        (given.folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters in {given.folder}")
