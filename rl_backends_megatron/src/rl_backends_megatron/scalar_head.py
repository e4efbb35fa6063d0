"""Scalar heads (`head: scalar`): one number per token, in the layout of Transformers' sequence classification.

The head is a matrix [1, H] without bias, `score.weight`, replicated on all tensor-parallel ranks of the last stage. For the
folder of a causal LM it is initialized with zeros, so that all values are 0 before the first step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rl_backends_megatron.families import Family, Replicated, Source, Weight

HEAD: Final = "score.weight"
_OUTPUT: Final = "output_layer.weight"


class ScalarHead(torch.nn.Module):
    """Output layer that returns one number per hidden state.

    Args:
        config: Megatron's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(zeros)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M] float32 from [M, H]; computed in float32, because bfloat16 has steps of about 0.01 near 2."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)


class SourceWithHead:
    """A tensor source that adds a head of zeros if the folder has none.

    Args:
        source: the folder.
        hidden_size: H.
    """

    def __init__(self, source: Any, hidden_size: int) -> None:
        self._source, self._hidden_size = source, hidden_size

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor with this name."""
        if name == HEAD and name not in self._source:
            return torch.zeros(1, self._hidden_size)
        tensor: torch.Tensor = self._source.whole(name)
        return tensor

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries from `start` to `stop` along `dim`."""
        tensor: torch.Tensor = self._source.read_slice(name, dim, start, stop)
        return tensor

    def size(self, name: str, dim: int) -> int:
        """The tensor's length along `dim`."""
        length: int = self._source.size(name, dim)
        return length


def source_with_head(source: Any, hf: Any) -> Source:
    """The folder's tensors and a head."""
    return SourceWithHead(source, hf.hidden_size)


def with_scalar_head(family: Family) -> Family:
    """The family's tables with the scalar head instead of the output layer."""
    others = tuple(weight for weight in family.weights if _OUTPUT not in weight.megatron)
    return replace(family, weights=(*others, Weight((_OUTPUT,), (HEAD,), Replicated())))


def describe_classifier(hf: Any) -> None:
    """Mark a config as a classifier with one label, before it is saved."""
    hf.num_labels = 1
    hf.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf.model_type]]
