"""Tiny vision-language models as users have them: random weights, a tokenizer, a chat template and the image processor."""

import base64
import io
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("train/data", "backends_hf")]

import tiny_processors  # noqa: E402
import tiny_vlms  # noqa: E402

_IDS = {
    "idefics3": {"image_token_id": "<image>"},
    "qwen2_5_vl": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}
FAMILIES = tuple(_IDS)


def write(folder: Path, family: str) -> Path:
    """Write a model of the family to a folder."""
    tiny_processors.write_processor(folder, family, config=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = tiny_vlms._CONFIGS[family](False)
    config.text_config.update({"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0})
    if family == "idefics3":  # its tiles have 32 x 32 pixels
        config.vision_config.update({"image_size": 32, "patch_size": 8})
    config.update({key: tokenizer.convert_tokens_to_ids(name) for key, name in _IDS[family].items()})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and float(parameter.std()) < 0.05:
                    parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def png(seed: int, size: tuple[int, int] = (40, 24)) -> bytes:
    """A PNG file of random pixels."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def url(content: bytes) -> str:
    """The `data:` URL of a PNG file."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(content: bytes, **fields: str) -> dict:
    """An image of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": url(content), **fields}}
