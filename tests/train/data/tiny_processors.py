"""Folders of vision-language models without weights: a tiny tokenizer, the image processor and the config of a family.

`write_processor(folder, family)` writes the files that a published model has; nothing is downloaded. `own_processor(folder)` is
the family's own processor of these files, as a reference: its video processor, which needs torchvision, is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoTokenizer

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
_GEMMA3_TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<start_of_image>{% else %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_IMAGE_LINES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}MARK\n{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MEAN = [0.5, 0.5, 0.5]
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 16 * 16,
    "max_pixels": 64 * 64,
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": _MEAN,
    "image_std": _MEAN,
}
_TILES = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 32},
    "image_mean": _MEAN,
    "image_std": _MEAN,
}

_FAMILIES: Mapping[str, dict[str, Any]] = {
    "idefics3": {
        "tokens": ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        "tiles": 6,
        "image_token": ("image_token_id", "<image>"),
        "eos": "<end_of_utterance>",
        "template": _IDEFICS3_TEMPLATE,
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "preprocessor": {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
    },
    "smolvlm": {
        "tokens": ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>"),
        "tiles": 6,
        "image_token": ("image_token_id", "<image>"),
        "eos": "<end_of_utterance>",
        "template": _IDEFICS3_TEMPLATE,
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "preprocessor": {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
    },
    "qwen2_5_vl": {
        "tokens": _QWEN_TOKENS,
        "image_token": ("image_token_id", "<|image_pad|>"),
        "template": _QWEN2_5_VL_TEMPLATE,
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
        "preprocessor": _QWEN_IMAGES,
    },
    "qwen3_vl": {
        "tokens": _QWEN_TOKENS,
        "image_token": ("image_token_id", "<|image_pad|>"),
        "template": _QWEN2_5_VL_TEMPLATE,
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "preprocessor": _QWEN_IMAGES,
    },
    "gemma3": {
        "tokens": ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "names": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "image_token": ("image_token_index", "<image_soft_token>"),
        "eos": "<end_of_turn>",
        "template": _GEMMA3_TEMPLATE,
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "preprocessor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_mean": _MEAN,
            "image_std": _MEAN,
        },
    },
    "internvl": {
        "tokens": ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "names": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "image_token": ("image_token_id", "<IMG_CONTEXT>"),
        "template": _IMAGE_LINES_TEMPLATE.replace("MARK", "<IMG_CONTEXT>"),
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "preprocessor": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "min_patches": 1,
            "max_patches": 4,
            "image_mean": _MEAN,
            "image_std": _MEAN,
        },
    },
    "llava_onevision": {
        "tokens": ("<image>", "<video>"),
        "image_token": ("image_token_index", "<image>"),
        "template": _IMAGE_LINES_TEMPLATE.replace("MARK", "<image>"),
        "processor": {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        "preprocessor": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
            "image_mean": _MEAN,
            "image_std": _MEAN,
        },
    },
}
FAMILIES = tuple(_FAMILIES)


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
            "eos_token": settings.get("eos", "<|im_end|>"),
            "extra_special_tokens": settings.get("names", {}),
            "chat_template": settings["template"],
        },
        "processor_config.json": settings["processor"],
        "preprocessor_config.json": settings["preprocessor"] | {"processor_class": settings["processor"]["processor_class"]},
    }
    if config:
        key, name = settings["image_token"]
        files["config.json"] = {"model_type": family, key: tokenizer.token_to_id(name)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def own_processor(folder: Path) -> Any:
    """The processor of a folder, with the PIL backend, whose result is that of `AutoProcessor` on images."""
    settings = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    processor_class = getattr(transformers, settings.pop("processor_class"))
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "video_processor" not in processor_class.get_attributes():
        return processor_class(images, tokenizer, chat_template=tokenizer.chat_template, **settings)

    absent = SimpleNamespace(num_frames=1, fps=1, video_sampling={"max_frames": 1, "fps": 1})

    class ImagesOnly(processor_class):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is absent else super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly(images, tokenizer, absent, chat_template=tokenizer.chat_template, **settings)
