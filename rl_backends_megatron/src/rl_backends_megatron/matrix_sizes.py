"""Sizes of the matrices that a model multiplies with, from which a run computes the FLOPs of its training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rl_backends_megatron.model import head_dim

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def matrix_sizes(shapes: Mapping[str, Sequence[int]], hf: Any, *, tied: bool) -> dict[str, float]:
    """The fact `matrix_sizes` of `PolicyWorker.setup`. Of experts, those chosen for a token count.

    Args:
        shapes: of the whole weights, by their names in a Transformers checkpoint.
        hf: the Transformers config.
        tied: whether the head is the embedding.
    """
    head = _EMBEDDING if tied else _HEAD
    sizes: Counter[str] = Counter()
    for name, shape in shapes.items():
        if name.endswith(head):
            sizes["trained_head"] += math.prod(shape)
        elif len(shape) > 1 and not name.endswith(_EMBEDDING):
            sizes["experts" if ".experts." in name else "trained"] += math.prod(shape)
    if experts := sizes.pop("experts", 0):
        count = getattr(hf, "num_local_experts", None) or hf.num_experts
        sizes["trained"] += experts * hf.num_experts_per_tok // count
    return {**sizes, "attention": hf.num_hidden_layers * hf.num_attention_heads * head_dim(hf)}
