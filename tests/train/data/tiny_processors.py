"""Folders of vision-language models without weights: a tiny tokenizer, the image processor and the config of a family.

`write_processor(folder, family)` writes the files that a published model has; nothing is downloaded. `own_processor(folder)` is
the family's own processor of these files, as a reference: its video processor, which needs torchvision, is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor, Qwen2_5_VLProcessor

_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_TEXTS = ("What is in the picture? It is a red square.", "user assistant system 0123456789 : .", "\n\n \n a b c")

_IDEFICS3_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN2_5_VL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MEAN = [0.5, 0.5, 0.5]

_FAMILIES: Mapping[str, dict[str, Any]] = {
    "idefics3": {
        "tokens": ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        "tiles": 6,
        "image_token": ("image_token_id", "<image>"),
        "eos": "<end_of_utterance>",
        "template": _IDEFICS3_TEMPLATE,
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "preprocessor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "image_mean": _MEAN,
            "image_std": _MEAN,
        },
        "config": {"model_type": "idefics3", "vision_config": {"image_size": 32, "patch_size": 8}, "scale_factor": 2},
    },
    "qwen2_5_vl": {
        "tokens": ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
        "image_token": ("image_token_id", "<|image_pad|>"),
        "eos": "<|im_end|>",
        "template": _QWEN2_5_VL_TEMPLATE,
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 16 * 16,
            "max_pixels": 64 * 64,
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": _MEAN,
            "image_std": _MEAN,
        },
        "config": {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}},
    },
}
FAMILIES = tuple(_FAMILIES)
_CLASSES = {"Idefics3Processor": Idefics3Processor, "Qwen2_5_VLProcessor": Qwen2_5_VLProcessor}


@lru_cache
def _tokenizer(family: str) -> str:
    settings = _FAMILIES[family]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_TEXTS, trainer)
    count = settings.get("tiles", 0)
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, count + 1) for column in range(1, count + 1)]
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in (*settings["tokens"], *tiles)])
    return str(bpe.to_str())


def write_processor(folder: Path, family: str, *, config: bool = True) -> None:
    """Write the tokenizer, the chat template and the processor of a family.

    Args:
        folder: created if necessary.
        family: one of `FAMILIES`.
        config: whether to write `config.json`, with the ids of tokens; a builder of models writes its own.
    """
    settings = _FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_tokenizer(family))
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _SPECIAL[0],
            "eos_token": settings["eos"],
            "chat_template": settings["template"],
        },
        "processor_config.json": settings["processor"],
        "preprocessor_config.json": settings["preprocessor"] | {"processor_class": settings["processor"]["processor_class"]},
    }
    if config:
        key, name = settings["image_token"]
        files["config.json"] = settings["config"] | {key: tokenizer.token_to_id(name)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def own_processor(folder: Path) -> Any:
    """The processor of a folder, with the PIL backend, whose result is that of `AutoProcessor` on images."""
    settings = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    processor_class = _CLASSES[settings.pop("processor_class")]
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "video_processor" not in processor_class.get_attributes():
        return processor_class(images, tokenizer, chat_template=tokenizer.chat_template, **settings)

    class ImagesOnly(processor_class):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly(images, tokenizer, None, chat_template=tokenizer.chat_template, **settings)
