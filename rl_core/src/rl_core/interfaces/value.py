"""Models with a scalar per token: the critic of an actor, or a reward model. They neither sample nor score tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypedDict

import torch

from rl_core.interfaces.generation import GenerationDatumSpec
from rl_core.interfaces.trainable import TrainableInterface

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


class ValueOutputSpec(TypedDict):
    """Output of the scalar head."""

    values: torch.Tensor
    """[B, T] float32; position t is the head's output after token t was read, so the value of the state in which token t is
    sampled is at t - 1; 0.0 on padding."""


class ValueInterface(TrainableInterface):
    """A language model with a scalar head (`policy.head: scalar`).

    Its loss functions receive `values` [B, T], laid out as `ValueOutputSpec`, where those of a policy receive
    log-probabilities; possibly 0.0 wherever `token_mask * sample_mask` is 0. They carry the gradient.
    """

    @abstractmethod
    def get_values(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ValueOutputSpec]:
        """Compute the value at every token of `data` (`input_ids` [B, T] and `input_lengths` [B]) under the current weights.

        Raises:
            NotSupportedError: the model has a language-model head.
        """
