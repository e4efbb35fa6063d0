"""How many rows are decoded together: as many as their keys and values have memory at full length."""

from __future__ import annotations

from typing import Final

import torch
from transformers import PreTrainedModel

from rl_backends_hf.transformers_internals import config_of_each_layer, head_width

SHARE_OF_FREE_MEMORY: Final = 0.8
"""The rest of a GPU's memory is for the prompts that are being computed, activations and logits."""


class CacheBudget:
    """A limit of rows and of the bytes of their keys and values.

    Args:
        model: the model that decodes.
        max_rows: maximum number of rows.
        max_bytes: memory limit of all keys and values. By default, a share of the memory that is free on the GPU when the first
            rows begin; unlimited on a CPU.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int, max_bytes: int | None) -> None:
        self.max_rows = max_rows
        self._given = self._max_bytes = max_bytes
        self._token_bytes = token_bytes(model)
        self._device = model.get_input_embeddings().weight.device

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
        return max(1, min(self.max_rows, self._max_bytes // (longest * self._token_bytes)))


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token in all layers."""
    width = 0
    for layer in config_of_each_layer(model.config.get_text_config(decoder=True)):
        width += (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) * head_width(layer)
    return int(2 * width * model.dtype.itemsize)
