"""The vision-language model with which the conformance kit tests our backends, and a test class may test others."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rl_core.data.images import ImageInputs, RowImage
from rl_core.testing.images import PictureModel
from rl_core.testing.reference import EOS, FIRST_BYTE, MAX_LENGTH, PAD, VOCABULARY, Weights

_PLACEHOLDER, _OPENS, _CLOSES = VOCABULARY - 2, FIRST_BYTE, FIRST_BYTE + 1
_PATCH, _SIZES = 4, ((4, 4), (4, 8))
"""Pixels of a side of a patch, and patches of a picture; four of them are a feature."""


class QwenVL(PictureModel):
    """A Qwen2.5-VL of 110,000 parameters by Transformers' own forward pass, one row at a time."""

    @cached_property
    def _module(self) -> Any:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
        lengths = {"num_key_value_heads": 1, "max_position_embeddings": MAX_LENGTH, "rope_parameters": rope}
        patches = {"patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
        tower = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 64, **patches}
        config = Qwen2_5_VLConfig(
            text_config={**sizes, **lengths, **ids, "tie_word_embeddings": False},
            vision_config={**tower, "fullatt_block_indexes": [0]},
            image_token_id=_PLACEHOLDER,
            video_token_id=VOCABULARY - 1,
            vision_start_token_id=_OPENS,
            vision_end_token_id=_CLOSES,
            tie_word_embeddings=False,
            dtype="float32",
            architectures=["Qwen2_5_VLForConditionalGeneration"],
        )
        module = Qwen2_5_VLForConditionalGeneration(config).eval()
        # `logits` passes sampled placeholders, which are not replaced, as other ids.
        module.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0] % VOCABULARY,))
        return module

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names in the checkpoint, by those in the module."""
        names = self._module.state_dict()
        return {name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model.") for name in names}

    def make_weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        weights = {}
        for name, tensor in self._module.state_dict().items():
            start, width = (0.0, 0.2) if tensor.ndim > 1 else (float("norm" in name or "ln_q" in name), 0.1)
            weights[self._names[name]] = start + width * torch.randn(tensor.shape, generator=generator)
        return weights

    def save_weights(self, folder: Path, weights: Weights) -> None:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        self._module.config.save_pretrained(folder)

    def logits(self, weights: Weights, tokens: torch.Tensor, images: Sequence[RowImage] = ()) -> torch.Tensor:
        named = {name: weights[stored] for name, stored in self._names.items()}
        shown = torch.zeros_like(tokens)
        shown[[at for image in images for at in image.placeholders(tokens.tolist())]] = 1
        ids = torch.where((tokens == _PLACEHOLDER) & (shown == 0), tokens + VOCABULARY, tokens)
        given = {name: torch.cat([image.inputs[name] for image in images]) for name in (images[0].inputs if images else ())}
        given |= {"mm_token_type_ids": shown[None]} if images else {}
        self._module.model.rope_deltas = None
        call = {"input_ids": ids[None], "use_cache": False, **given}
        logits: torch.Tensor = torch.func.functional_call(self._module, named, kwargs=call).logits[0]
        return logits

    def picture(self, seed: int) -> tuple[list[int], RowImage]:
        height, width = _SIZES[seed % 2]
        count, generator = height * width // 4, torch.Generator().manual_seed(seed)
        pixels = torch.randn(height * width, 3 * 2 * _PATCH * _PATCH, generator=generator)
        inputs = ImageInputs(pixel_values=pixels, image_grid_thw=torch.tensor([[1, height, width]]))
        places = {"start": 1, "length": count, "placeholder_id": _PLACEHOLDER, "num_placeholders": count}
        return [_OPENS, *[_PLACEHOLDER] * count, _CLOSES], RowImage(digest=inputs.digest(), inputs=inputs, **places)
