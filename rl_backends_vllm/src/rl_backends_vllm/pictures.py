"""Pictures in vLLM's engine: the tensors that the policy reads, at the same tokens.

vLLM would read a picture itself, with its own copy of the model's processor, and write the tokens that stand for it. Here, both
are in the row, so requests have the tensors of each picture and the positions of its features, and nothing in vLLM runs a
processor, which on a CPU would need torchvision. Vision-language models are computed with the classes of Transformers, like the
policy's, since vLLM's own classes read tensors in other forms and need torchvision as well.

The digest of a picture distinguishes prompts with equal tokens in the prefix cache, and keeps the features of a picture for the
requests that show it, until a refit (`Engine.reset_prefix_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.transformers import (
    TransformersMultiModalForCausalLM,
    TransformersMultiModalMoEForCausalLM,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.v1.core.sched import output

from rl_core.data.images import RowImage

_STACKED = MultiModalBatchedField()
"""A tensor [1, ...] per picture: vLLM stacks those of equal shapes, and computes others one by one."""
_ON_CPU = MultiModalBatchedField(keep_on_cpu=True)
"""The same, read on the CPU."""
# `slices` has no effect on tensors that are separate already.
_ROWS, _TILES = MultiModalFlatField(slices=(), dim=0), MultiModalFlatField(slices=(), dim=1)
_FIELDS: Final[Mapping[str, Mapping[str, MultiModalFlatField]]] = {
    **{family: {"pixel_values": _ROWS} for family in ("qwen2_vl", "qwen2_5_vl", "internvl")},
    **{family: {"pixel_values": _TILES, "pixel_attention_mask": _TILES} for family in ("idefics3", "smolvlm")},
}
"""By model type, tensors that are concatenated: they have a dimension of patches or tiles."""


class _Limits(BaseProcessingInfo):
    """What vLLM asks about the model's processor: kinds of media, and the largest number of tokens of each."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}


class _NoProfile(BaseDummyInputsBuilder[_Limits]):
    """No pictures: memory is not measured with them (`skip_mm_profiling`)."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        return {}


class _NoProcessor(BaseMultiModalProcessor[_Limits]):
    """Requests have tensors and tokens already."""

    requires_tokenizer = False

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("Rows of this engine have the tensors of their pictures.")

    def _get_mm_fields_config(self, *args: Any) -> NoReturn:
        self.apply()

    def _get_prompt_updates(self, *args: Any) -> NoReturn:
        self.apply()


for _model in (TransformersMultiModalForCausalLM, TransformersMultiModalMoEForCausalLM):
    MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_Limits, dummy_inputs=_NoProfile)(_model)


def _with_all_tensors(mm_features: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return mm_features


# vLLM sends workers no tensors of pictures in a prefix that is cached already. Its runner for CPUs fails on such a row when
# the row is computed again, which happens at a refit and when the KV cache is full.
output.strip_covered_mm_data = _with_all_tensors


def picture_input(tokens: Sequence[int], images: Sequence[RowImage], *, model_type: str) -> Any:
    """The input of vLLM for a prompt with images.

    Raises:
        DataError: an image is outside of the prompt, or has another number of placeholders there than it says.
    """
    ids = torch.tensor(tokens)
    for image in images:
        image.placeholders(tokens)
    return mm_input(
        list(tokens),
        MultiModalKwargsItems({"image": [_item(image, model_type) for image in images]}),
        {"image": [image.digest for image in images]},
        {
            "image": [
                PlaceholderRange(
                    offset=image.start,
                    length=image.length,
                    is_embed=ids[image.start : image.end] == image.placeholder_id,
                )
                for image in images
            ]
        },
    )


def _item(image: RowImage, model_type: str) -> MultiModalKwargsItem:
    # The model's output is divided into pictures by these numbers.
    elements = {"num_image_patches": MultiModalFieldElem(torch.tensor([image.num_placeholders]), _ON_CPU)}
    for name, tensor in image.inputs.items():
        if (field := _FIELDS.get(model_type, {}).get(name)) is not None:
            elements[name] = MultiModalFieldElem(tensor, field)
        else:
            elements[name] = MultiModalFieldElem(tensor[0], _ON_CPU if name == "image_grid_thw" else _STACKED)
    return MultiModalKwargsItem(elements)
