"""Pictures in vision-language models: the features that their tower computes, and where those go.

Before rows are laid out, the token that stands for feature n of the pictures of a microbatch is replaced by the id -1 - n. Ids
thus say by position, not by value, which tokens are features: the model may sample the placeholder itself. They also tell
prompts apart that differ only in their pictures, so that rows share a prefix only as far as they show the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_backends_base import ScoringInput
from rl_core.data.batched_data_dict import to_device
from rl_core.data.images import ImageInputs, RowImage
from rl_core.errors import DataError

FAMILIES: Final = ("gemma3", "idefics3", "internvl", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Model types whose images are supported: tested against their own forward pass."""

Images = Sequence[Sequence[RowImage] | None]
"""Images of each row."""


def reads_images(model: PreTrainedModel) -> bool:
    """Whether rows of this model may have images."""
    return model.config.model_type in FAMILIES and hasattr(model.base_model, "get_image_features")


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part of a vision-language model that computes tokens, without embeddings of pictures and head; else the model."""
    part: nn.Module = model.get_decoder() if hasattr(model.base_model, "get_image_features") else model
    return part


def tower_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules with weights that compute the features of pictures: tower and projector; empty without any."""
    text = {*language_model(model).modules(), model.get_output_embeddings()}
    modules = model.base_model.modules() if text.isdisjoint({model}) else ()
    return [each for each in modules if each not in text and next(each.parameters(recurse=False), None) is not None]


def has_rope_grid(model: PreTrainedModel) -> bool:
    """Whether positions of tokens have three coordinates: time, height and width (multimodal rotary embeddings)."""
    return hasattr(model.base_model, "get_rope_index")


def attends_within_pictures(model: PreTrainedModel) -> bool:
    """Whether all tokens of a picture attend to each other (Gemma 3)."""
    return model.config.model_type in FAMILIES and "token_type_ids" in inspect.signature(model.base_model.forward).parameters


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Distinct pictures of rows that are computed together.

    Attributes:
        calls: for each call of the tower, its arguments, and the number of features.
        first: number of the first feature of each picture, by its digest.
    """

    calls: Sequence[tuple[Mapping[str, torch.Tensor], int]]
    first: Mapping[str, int]

    @classmethod
    def of(cls, images: Iterable[RowImage]) -> Pictures:
        """The pictures of `images`; those whose tensors can be concatenated are computed in one call."""
        distinct = {image.digest: image for image in images}
        by_shape: dict[Any, list[RowImage]] = {}
        for image in distinct.values():
            by_shape.setdefault(_shape(image.inputs), []).append(image)
        first: dict[str, int] = {}
        calls, start = [], 0
        for group in by_shape.values():
            begin = start
            for image in group:
                first[image.digest], start = start, start + image.num_placeholders
            names = group[0].inputs
            calls.append(({name: torch.cat([image.inputs[name] for image in group]) for name in names}, start - begin))
        return cls(calls=calls, first=first)

    def mark(self, input_ids: torch.Tensor, images: Images) -> torch.Tensor:
        """Ids [b, T] with the number of its feature, -1 - n, at each token that stands for one.

        Raises:
            DataError: an image is outside of its row, or has another number of placeholders there than it says.
        """
        marked = input_ids.clone()
        for number, row_images in enumerate(images):
            for image in row_images or ():
                marked[number] = torch.tensor(with_features(marked[number].tolist(), [image], self.first))
        return marked

    def embed(self, model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
        """What a vision-language model computes with instead of `ids` [b, T], which `mark` returned.

        Returns:
            Embeddings [b, T, H]; further arguments of the model; and further arguments of its language model.
        """
        features, deeper = self._features(model, ids.device)
        is_feature, number = ids < 0, (-1 - ids).clamp_(min=0)
        embeddings = model.get_input_embeddings()(ids.clamp(min=0))
        shown = features.index_select(0, number.flatten()).view(*ids.shape, -1).to(embeddings.dtype)
        embeddings = torch.where(is_feature.unsqueeze(-1), shown, embeddings)
        further = {"token_type_ids": is_feature.long()} if attends_within_pictures(model) else {}
        inner: dict[str, Any] = {}
        if deeper:
            later = [each.index_select(0, number[is_feature]) for each in deeper]
            inner = {"visual_pos_masks": is_feature, "deepstack_visual_embeds": later}
        return embeddings, further, inner

    def _features(self, model: PreTrainedModel, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Features [F, H] of all pictures, and those that are added after some of the first layers."""
        parts: list[list[torch.Tensor]] = []
        for arguments, count in self.calls:
            on_device = {name: to_device(tensor, device) for name, tensor in arguments.items()}
            output = model.base_model.get_image_features(**on_device, return_dict=True)
            part = [_flat(each) for each in (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))]
            if len(part[0]) != count:
                raise DataError(
                    f"{type(model).__name__} computes {len(part[0])} features for pictures with {count} placeholders in the "
                    "rows. Expand each picture with the model's own processor."
                )
            parts.append(part)
        features, *deeper = (torch.cat(each) for each in zip(*parts, strict=True))
        return features, deeper


def with_features(tokens: list[int], images: Collection[RowImage], first: Mapping[str, int]) -> list[int]:
    """The tokens of a row, in which -1 - n stands for feature n; `first` numbers the first feature of each digest.

    Raises:
        DataError: as `Pictures.mark`.
    """
    marked = [*tokens] if images else tokens
    for image in images:
        for number, at in enumerate(image.placeholders(tokens)):
            marked[at] = -1 - first[image.digest] - number
    return marked


def call_with_pictures(
    module: nn.Module, model: PreTrainedModel, ids: torch.Tensor, pictures: Pictures, **arguments: Any
) -> Any:
    """The output of `module`, which is `model` or its backbone, for ids that `Pictures.mark` returned."""
    embeddings, further, inner = pictures.embed(model, ids)
    with _passing(language_model(model), inner):
        return module(inputs_embeds=embeddings, **further, **arguments)


@contextmanager
def _passing(module: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, `module` is called with `arguments` as well, which the module around it would not pass on."""
    if not arguments:
        yield
        return
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, **arguments}), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def rope_positions(model: PreTrainedModel, ids: torch.Tensor, lengths: torch.Tensor, images: Images) -> torch.Tensor | None:
    """Coordinates [3, b, T] of tokens, 0 on padding; None if positions are plain numbers.

    Args:
        model: the model.
        ids: [b, T] of `Pictures.mark`, on the CPU.
        lengths: [b], tokens of each row.
        images: of each row.
    """
    if not has_rope_grid(model):
        return None
    rope_index = model.base_model.get_rope_index
    names = inspect.signature(rope_index).parameters
    positions = torch.zeros(3, *ids.shape, dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        row_images = images[row]
        if not row_images:
            positions[:, row, :length] = torch.arange(length)
            continue
        given = {
            name: torch.cat([image.inputs[name] for image in row_images]) for name in row_images[0].inputs if name in names
        }
        own = ids[row : row + 1, :length]
        try:
            positions[:, row, :length] = rope_index(own.clamp(min=0), mm_token_type_ids=(own < 0).int(), **given)[0][:, 0]
        except RuntimeError as error:  # a number of coordinates other than that of tokens
            raise DataError(
                f"{type(model).__name__} has other positions for the pictures of a row than for their "
                f"{int((own < 0).sum())} placeholders ({error}). Expand each picture with the model's own processor."
            ) from error
    return positions


def with_pictures(inputs: ScoringInput, pictures: Pictures, *, placeholder_id: int) -> ScoringInput:
    """`inputs` of marked ids, with the pictures, and with targets that are tokens."""
    targets = torch.where(inputs.targets < 0, placeholder_id, inputs.targets)
    return replace(inputs, targets=targets, attention={**inputs.attention, "pictures": pictures})


def _shape(inputs: ImageInputs) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in sorted(inputs.items()))


def _flat(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Features [F, H], which a model returns in one tensor, or in one for each picture."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
