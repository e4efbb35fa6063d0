"""What gives every token a number: the critic of an actor, or a model of rewards. It samples nothing and scores no tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypedDict

import torch

from rl_core.interfaces.generation import GenerationDatumSpec
from rl_core.interfaces.trainable import TrainableInterface

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict


class ValueOutputSpec(TypedDict):
    """What the scalar head says."""

    values: torch.Tensor
    """[B, T] float32; position t is the head's number after token t was read, so that the value of the state in which
    token t is sampled stands at t - 1; 0.0 on padding."""


class ValueInterface(TrainableInterface):
    """A language model with a scalar head (`policy.head: scalar`).

    Its loss functions are called with `values` [B, T] where those of a policy are called with log-probabilities, laid out as
    `ValueOutputSpec`, possibly 0.0 wherever `token_mask * sample_mask` is 0; they carry the gradient.
    """

    @abstractmethod
    def get_values(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ValueOutputSpec]:
        """Value every token of `data` under the current weights.

        Args:
            data: `input_ids` [B, T] and `input_lengths` [B]; other keys are ignored.

        Raises:
            NotSupportedError: the model's head scores tokens.
        """
