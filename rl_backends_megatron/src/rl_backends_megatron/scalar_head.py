"""Scalar heads (`head: scalar`): one number per token, in the layout of Transformers' sequence classification.

The head is a matrix [1, H] without bias, `score.weight`, replicated on all tensor-parallel ranks of the last stage. For the
folder of a causal LM it is initialized with zeros, so that all values are 0 before the first step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rl_backends_megatron.families import Family, Replicated, Weight

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


def with_scalar_head(family: Family) -> Family:
    """The family's tables with the scalar head instead of the output layer."""
    others = tuple(weight for weight in family.weights if _OUTPUT not in weight.megatron)
    return replace(family, weights=(*others, Weight((_OUTPUT,), (HEAD,), Replicated())))


def describe_classifier(hf: Any) -> None:
    """Mark a config as a classifier with one label, before it is saved."""
    hf.num_labels = 1
    hf.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf.model_type]]
