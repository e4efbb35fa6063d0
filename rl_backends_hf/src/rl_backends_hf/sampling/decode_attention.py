"""Attention and masks for decoding one token per row.

With a mask, Transformers repeats keys and values for every query head of a group before SDPA, which copies the whole cache
several times per token. Here, the query heads of a group are treated as query positions of their key head, so nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_backends_hf.cpu_attention import is_plain, refuse_ignored
from rl_backends_hf.sampling.kv_cache import SlotCache, SlotLayer
from rl_backends_hf.sampling.shared_prompts import attend_by_products, prefers_products
from rl_backends_hf.transformers_internals import attention_of, layers_of, takes_other_attention
from rl_core.errors import NotSupportedError

GROUPED = "rlcore_grouped_sdpa"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slot_cache: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the signature that Transformers expects, without repeating keys and values when decoding one token per row.

    Args:
        module: the attention layer.
        query: [N, query heads, 1, D].
        key: [N, key heads, K, D].
        value: [N, key heads, K, D'].
        attention_mask: [N, 1, 1, K]; bool, or added to the scores.
        slot_cache: the rows' cache if they share prompts.
        **kwargs: as Transformers passes them; `scaling` is the factor of the scores.
    """
    refuse_ignored(module, kwargs)
    rows, heads, length, width = query.shape
    grouped, scale = query.reshape(rows, key.shape[1], -1, width), kwargs.get("scaling")
    adds_mask = attention_mask is not None and attention_mask.is_floating_point() and is_plain(module, kwargs)
    layer, prompts = (None, None) if slot_cache is None else (slot_cache.layers[module.layer_idx], slot_cache.prompts)
    if attention_mask is not None and adds_mask and isinstance(layer, SlotLayer) and layer.holds(key, value):
        assert layer.prompts is not None
        assert prompts is not None
        output = prompts.attend(grouped, layer.prompts, (key, value), attention_mask, scale=scale)
    elif length == 1 and attention_mask is not None and adds_mask and prefers_products(query.device, query.dtype):
        output = attend_by_products(grouped, key, value, attention_mask, scale=scale)
    elif length > 1 or heads == key.shape[1] or kwargs.get("position_bias") is not None or kwargs.get("cache") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    else:
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use `grouped_sdpa` instead of SDPA or flash attention in `model` while the block runs."""
    before = attention_of(model)
    if before == "eager" or not takes_other_attention(model):
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Attention pattern of a model's layers.

    Attributes:
        num_layers: number of layers with keys and values.
        kinds: `full_attention`, `sliding_attention` or both.
        window: size in tokens of the sliding window.
    """

    num_layers: int
    kinds: frozenset[str]
    window: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionLayout:
        """Read the layout from a model's config.

        Raises:
            NotSupportedError: a layer has other state, such as a recurrent state or chunked attention.
        """
        text = model.config.get_text_config(decoder=True)
        kinds, arguments = layers_of(text)
        recurrent = {"recurrent"}.intersection(getattr(text, "layers_block_type", ()))  # RecurrentGemma has no `layer_types`
        unknown = sorted({*kinds, *recurrent} - {_FULL, _SLIDING})
        windows = {entry["sliding_window"] for entry in arguments if "sliding_window" in entry}
        if unknown or len(windows) > 1:
            found = f"layers of type {', '.join(unknown)}" if unknown else f"several sliding windows, {sorted(windows)}"
            raise NotSupportedError(
                f"{type(model).__name__} has {found}. This sampler supports only full and sliding-window attention. Use "
                "another generation backend for this model."
            )
        return cls(num_layers=len(kinds), kinds=frozenset(kinds), window=next(iter(windows), None))

    def mask(self, cache: SlotCache, *, score_dtype: torch.dtype | None) -> torch.Tensor | dict[str, torch.Tensor]:
        """Mask [N, 1, 1, K] for the model's forward pass, or one mask per layer type.

        Args:
            cache: the rows.
            score_dtype: dtype of the scores to which the mask is added; None for a bool mask, which SDPA takes.
        """
        masks = {
            kind: _shaped(cache.attendable(window=self.window if kind == _SLIDING else None), score_dtype)
            for kind in self.kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _shaped(seen: torch.Tensor, score_dtype: torch.dtype | None) -> torch.Tensor:
    seen = seen[:, None, None, :]
    if score_dtype is None:
        return seen
    return torch.zeros_like(seen, dtype=score_dtype).masked_fill_(~seen, torch.finfo(score_dtype).min)
