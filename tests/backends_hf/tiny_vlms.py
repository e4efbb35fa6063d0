"""Tiny vision-language models with random weights, saved as users have them, and rows whose pictures are random tensors.

`make(family, folder)` writes a model, `picture(family, seed)` makes the tensors that its image processor would return for one
picture, and `row(family, ...)` the tokens of a conversation with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import ImageInputs, RowImage

VOCAB_SIZE = 160
PLACEHOLDER, OPENS, CLOSES = 150, 151, 152
"""The token that is replaced by a feature, and those around a picture."""
FAMILIES = ("idefics3", "qwen2_5_vl", "smolvlm", "qwen2_vl", "qwen3_vl", "gemma3", "llava_onevision", "internvl")
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose tokens have positions with three coordinates."""

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that log-probabilities differ by whole nats, so that errors are visible.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN = {"image_token_id": PLACEHOLDER, "video_token_id": 153, "vision_start_token_id": OPENS, "vision_end_token_id": CLOSES}
_QWEN_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}


def _siglip(**fields: Any) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", **_TOWER, **fields}


_CONFIGS: dict[str, Callable[[bool], transformers.PretrainedConfig]] = {
    "idefics3": lambda tied: transformers.Idefics3Config(
        text_config={"model_type": "llama", **_TEXT, "tie_word_embeddings": tied},
        vision_config=_TOWER,
        image_token_id=PLACEHOLDER,
        scale_factor=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    ),
    "smolvlm": lambda tied: transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **_TEXT, "tie_word_embeddings": tied},
        vision_config=_TOWER,
        image_token_id=PLACEHOLDER,
        scale_factor=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    ),
    "qwen2_5_vl": lambda tied: transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "tie_word_embeddings": tied, "rope_parameters": _MROPE},
        vision_config={**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        tie_word_embeddings=tied,
        **_QWEN,
    ),
    "qwen2_vl": lambda tied: transformers.Qwen2VLConfig(
        text_config={**_TEXT, "tie_word_embeddings": tied, "rope_parameters": _MROPE},
        vision_config={**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        tie_word_embeddings=tied,
        **_QWEN,
    ),
    "qwen3_vl": lambda tied: transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "tie_word_embeddings": tied, "rope_parameters": _MROPE},
        vision_config={**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=tied,
        **_QWEN,
    ),
    "gemma3": lambda tied: transformers.Gemma3Config(
        text_config={
            **{**_TEXT, "tie_word_embeddings": tied, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=_siglip(vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=PLACEHOLDER,
        boi_token_id=OPENS,
        eoi_token_id=CLOSES,
        tie_word_embeddings=tied,
    ),
    "llava_onevision": lambda tied: transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_TEXT, "tie_word_embeddings": tied},
        vision_config=_siglip(vision_use_head=False),
        image_token_id=PLACEHOLDER,
        video_token_id=153,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=tied,
    ),
    "internvl": lambda tied: transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT, "tie_word_embeddings": tied},
        vision_config={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=PLACEHOLDER,
        downsample_ratio=0.5,
        tie_word_embeddings=tied,
    ),
}


def make(family: str, folder: Path, *, tied: bool = False, wide: bool = False) -> str:
    """Write a model of the family, whose features are about as large as the embeddings of its tokens; returns the folder.

    With `wide`, the attention to tokens has heads of 32 values, the smallest that vLLM supports on a CPU.
    """
    config = _CONFIGS[family](tied)
    if wide:
        config.text_config.update({"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
        if family in MROPE:
            config.text_config.rope_parameters = {**_MROPE, "mrope_section": [4, 6, 6]}
            config.vision_config.update({"hidden_size" if family == "qwen2_vl" else "out_hidden_size": 64})
    with torch.random.fork_rng():
        torch.manual_seed(11 + FAMILIES.index(family))
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and float(parameter.std()) < 0.05:
                    parameter.normal_(std=0.2)
    assert sum(each.numel() for each in model.parameters()) < 2e6
    model.save_pretrained(folder)
    return str(folder)


def picture(family: str, seed: int) -> tuple[ImageInputs, int]:
    """The tensors of a picture, of a size that depends on the seed, and the number of its placeholders."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    more = seed % 3
    if family in ("idefics3", "smolvlm"):
        tiles = 1 + more
        mask = torch.ones(1, tiles, 16, 16, dtype=torch.int64)
        mask[:, -1, :, 12:] = 0  # the last tile is padded
        return ImageInputs(pixel_values=noise(1, tiles, 3, 16, 16), pixel_attention_mask=mask), 4 * tiles
    if family in MROPE:
        height, width = 4, 4 + 2 * more
        grid = torch.tensor([[1, height, width]])
        return ImageInputs(pixel_values=noise(height * width, 3 * 2 * 4 * 4), image_grid_thw=grid), height * width // 4
    if family == "gemma3":
        return ImageInputs(pixel_values=noise(1, 3, 16, 16)), 4
    if family == "llava_onevision":
        # The whole picture, and the tiles of its grid with a separator after each line of patches.
        height, width = ((16, 16), (16, 32), (32, 16))[more]
        tiles = height * width // 256
        sizes = torch.tensor([[height, width]])
        return ImageInputs(pixel_values=noise(1, 1 + tiles, 3, 16, 16), image_sizes=sizes), 16 + height // 4 * (width // 4 + 1)
    tiles = 1 + more
    return ImageInputs(pixel_values=noise(tiles, 3, 16, 16)), 4 * tiles


def row_image(family: str, seed: int, *, start: int) -> RowImage:
    """A picture that opens at `start`: a token that opens it, its placeholders, and a token that closes it."""
    inputs, count = picture(family, seed)
    return RowImage(
        digest=inputs.digest(), start=start, length=count + 2, placeholder_id=PLACEHOLDER, num_placeholders=count, inputs=inputs
    )


def row(family: str, parts: Sequence[int | Sequence[int]]) -> tuple[list[int], list[RowImage] | None]:
    """Tokens of a conversation and its images; a part is a list of tokens, or the seed of a picture."""
    tokens: list[int] = []
    images: list[RowImage] = []
    for part in parts:
        if isinstance(part, int):
            image = row_image(family, part, start=len(tokens))
            images.append(image)
            tokens += [OPENS, *[PLACEHOLDER] * image.num_placeholders, CLOSES]
        else:
            tokens += part
    return tokens, images or None


def batch(rows: Sequence[tuple[list[int], list[RowImage] | None]], *, prompt: int = 2, **columns: Any) -> BatchedDataDict:
    """A batch of rows, whose tokens are trained after the first `prompt` of them, except those of pictures."""
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    column = torch.arange(width)
    mask = (column >= prompt) & (column < lengths.unsqueeze(1))
    for number, (_, images) in enumerate(rows):
        for image in images or ():
            mask[number, image.start : image.end] = False
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=mask.float(),
        sample_mask=torch.ones(len(rows)),
        weights=torch.linspace(0.5, 1.5, len(rows)),
        images=[images for _, images in rows],
        **columns,
    )


def words(seed: int, count: int) -> list[int]:
    """Random tokens of text."""
    return torch.randint(3, 140, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def conversations(family: str) -> BatchedDataDict:
    """Rows without, with one, and with several images, in one turn or two; one picture occurs in several rows."""
    return batch(
        [
            row(family, [words(1, 5), 0, words(2, 6)]),
            row(family, [words(3, 12)]),
            row(family, [words(4, 3), 1, words(5, 2), 2, words(6, 5)]),
            row(family, [words(7, 4), 0, words(8, 4), 4, words(9, 7)]),
            # The model has sampled the placeholder itself.
            row(family, [words(10, 4), 2, words(11, 3), [PLACEHOLDER], words(12, 2)]),
            row(family, [words(13, 4), [PLACEHOLDER], words(14, 3)]),
        ]
    )


def samples(family: str) -> BatchedDataDict:
    """Rows of two prompts with the same tokens and different pictures, and rows whose second turns show different ones."""
    rows, prompts = [], []
    for prompt, seed in ((0, 0), (1, 3)):
        for number in range(3):
            rows.append(row(family, [words(1, 5), seed, words(2, 4), words(20 + number, 3 + number)]))
            prompts.append(prompt)
    for number, seed in enumerate((1, 4)):
        rows.append(row(family, [words(1, 5), 0, words(3, 6), seed, words(30 + number, 4)]))
        prompts.append(2)
    return batch(rows, prompt_id=torch.tensor(prompts))


OF_RANKS = (("replicate", "float32", []), ("fsdp2", "float32", []), ("fsdp2", "bfloat16", ["vis*"]))
"""Mode, data type and frozen modules of two ranks."""


def rows_of_ranks(family: str) -> BatchedDataDict:
    """Three rows with pictures, for the first rank, and three without."""
    return conversations(family).select_indices([0, 2, 3, 1, 5, 1])


def plain(folder: str) -> Any:
    """The model by Transformers, float32."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def plain_logits(model: Any, tokens: torch.Tensor, images: Sequence[RowImage] | None) -> torch.Tensor:
    """Logits [T, V] of one row by the model's own forward pass, which takes its pictures one after the other.

    A placeholder that was sampled is not replaced: it becomes another id with the same embedding, which is added to the model.
    """
    base, ids = model.base_model, tokens.clone()
    types = torch.zeros_like(ids)
    for image in images or ():
        span = slice(image.start, image.end)
        types[span] = (ids[span] == image.placeholder_id).long()
    embedding = model.get_input_embeddings()
    ids[(tokens == PLACEHOLDER) & (types == 0)] = len(embedding.weight)
    arguments: dict[str, Any] = {}
    for name in {name for image in images or () for name in image.inputs}:
        tensors = [image.inputs[name] for image in images or ()]
        if type(model).__name__.startswith("LlavaOnevision") and name == "pixel_values":
            most = max(each.shape[1] for each in tensors)
            tensors = [torch.nn.functional.pad(each, (0, 0) * 3 + (0, most - each.shape[1])) for each in tensors]
        tiled = type(model).__name__.startswith(("Idefics3", "SmolVLM"))
        arguments[name] = torch.cat(tensors, dim=1 if tiled else 0)
    if hasattr(base, "get_rope_index") and images:
        arguments["mm_token_type_ids"] = types[None]
    if type(model).__name__.startswith("Gemma3") and images:
        arguments["token_type_ids"] = types[None]

    def embed(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (torch.where(inputs[0] == len(embedding.weight), PLACEHOLDER, inputs[0]),)

    hook = embedding.register_forward_pre_hook(embed)
    try:
        return model(input_ids=ids[None], use_cache=False, **arguments).logits[0]
    finally:
        hook.remove()
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = None


def plain_logprobs(model: Any, rows: BatchedDataDict, *, temperature: float = 1.0) -> torch.Tensor:
    """The reference: log-probabilities [B, T] of every row alone."""
    columns = []
    for ids, length, images in zip(rows["input_ids"], rows["input_lengths"].tolist(), rows["images"], strict=True):
        logits = plain_logits(model, ids[:length], images)[:-1].float() / temperature
        picked = torch.log_softmax(logits, dim=-1).gather(1, ids[1:length, None])[:, 0]
        columns.append(torch.nn.functional.pad(picked, (1, len(ids) - length)))
    return torch.stack(columns)


def plain_loss(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    """The loss of `policy_cases.NLL` over all rows, by Transformers and autograd alone."""
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    return -(plain_logprobs(model, rows) * mask * rows["weights"].unsqueeze(1)).sum() / mask.sum()
