"""The memory that the cache of a row needs, and the number of rows that are decoded together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from rl_backends_hf.config import HFSamplerConfig
from rl_backends_hf.sampling.prefill import AttentionLayout
from rl_backends_hf.torch_internals import tree_leaves
from rl_backends_hf.transformers_internals import cache_keyword

SHARE_OF_FREE_MEMORY: Final = 0.8
"""The rest of a GPU's memory is for the prompts that are being computed, activations and logits."""


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of what a model keeps of one row while it samples.

    Attributes:
        state: whatever the length of the row, as recurrent layers and convolutions do.
        rates: for each layer that keeps tokens, the bytes of one, and how many it keeps at most (None: all).
    """

    state: int
    rates: tuple[tuple[int, int | None], ...]

    def of(self, length: int) -> int:
        """Bytes of a row of `length` tokens, at least 1."""
        kept = (rate * (length if most is None else min(length, most)) for rate, most in self.rates)
        return max(1, self.state + sum(kept))

    def growth(self, length: int) -> int:
        """Bytes that one more token adds to a row of `length` tokens."""
        return sum(rate for rate, most in self.rates if most is None or most > length)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> RowBytes:
        """Measured: the model computes two tokens, one after the other, with the cache of the engine.

        Args:
            model: with weights, or with tensors without data (`torch_internals.without_data`).
        """
        slots = AttentionLayout.of(model) is not None  # these keep the tokens outside of a sliding window, too
        cache = DynamicCache() if slots else DynamicCache(config=model.config)
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
        sizes = []
        for position in range(2):
            with torch.no_grad():
                model(input_ids=token, position_ids=token + position, use_cache=True, **{cache_keyword(model): cache})
            sizes.append([_bytes_of(layer) for layer in cache.layers])
        grown = [(second - first, layer) for first, second, layer in zip(*sizes, cache.layers, strict=True)]
        return cls(
            state=sum(sizes[0]) - sum(rate for rate, _ in grown),
            rates=tuple((rate, _most_tokens(layer)) for rate, layer in grown if rate),
        )


def _bytes_of(layer: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(vars(layer)) if isinstance(each, torch.Tensor) and each.ndim > 0)


def _most_tokens(layer: Any) -> int | None:
    window: int | None = getattr(layer, "sliding_window", None)
    return None if window is None else window - 1


class CacheBudget:
    """A limit of rows and of the bytes of their cache.

    Args:
        model: the model that decodes.
        options: has the limits. Without `kv_cache_gib`, it is a share of the memory that is free on the GPU when the first rows
            begin; unlimited on a CPU.
        row_bytes: what a row needs; measured with the model by default, if there is a limit.
    """

    def __init__(self, model: PreTrainedModel, options: HFSamplerConfig, row_bytes: RowBytes | None = None) -> None:
        self.max_rows, gib = options.max_batch_rows, options.kv_cache_gib
        self._given = self._max_bytes = None if gib is None else int(gib * 2**30)
        self._model, self._row_bytes = model, row_bytes

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit of bytes."""
        return self._given is not None or self._device.type == "cuda"

    def measure(self) -> None:
        """Read the free memory of the GPU, if the limit depends on it; to be called while there are no keys and values."""
        if self._given is None and self._device.type == "cuda":
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            self._max_bytes = int(SHARE_OF_FREE_MEMORY * (torch.cuda.mem_get_info(self._device)[0] + unused))

    def rows(self, *, longest: int) -> int:
        """Number of rows of at most `longest` tokens that may be decoded together; at least one."""
        if self._max_bytes is None:
            return self.max_rows
        self._row_bytes = self._row_bytes or RowBytes.of_model(self._model)
        return max(1, min(self.max_rows, self._max_bytes // self._row_bytes.of(longest)))
