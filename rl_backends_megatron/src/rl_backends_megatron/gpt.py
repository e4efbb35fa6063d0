"""Megatron's GPT with a separate head: the last stage returns hidden states; only selected positions get logits.

Prompts and padding are not trained on, and their logits would be the largest tensors of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rl_backends_megatron.scalar_head import ScalarHead


class HeadlessGPT(GPTModel):
    """A `GPTModel` whose forward pass ends before the output layer. Takes the same arguments and these.

    Args:
        scalar: end in a scalar head instead of logits.
        embedding_scale: factor of token embeddings; not applied to an output layer that shares their matrix.
    """

    scalar: bool

    def __init__(self, *args: Any, scalar: bool = False, embedding_scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scalar = scalar
        if self.pre_process and embedding_scale != 1.0:
            # Rounded to the weights' dtype first, as in Transformers.
            scale = torch.tensor(embedding_scale, dtype=self.config.params_dtype).item()
            self.embedding.register_forward_hook(lambda module, given, embedded: embedded * scale)
        self._sequence_parallel = bool(self.config.sequence_parallel)
        if scalar and self.post_process:
            self.output_layer: Any = ScalarHead(self.config)
        elif self.post_process:
            # The sequence is gathered in `apply_head`, before positions are selected, instead of in the layer.
            self.output_layer.sequence_parallel = False

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def apply_head(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [M, V' / R] of the model's dtype, this rank's columns; for a scalar head, values [M] float32.

        Args:
            hidden: [L, b, H] of the last stage, or this rank's shard along L with sequence parallelism.
            positions: [M] int64, flat indices into [b, L].
        """
        if self._sequence_parallel:
            # The output layer returns full gradients, so each rank takes its shard of them.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        length, rows, _ = hidden.shape
        index = positions % length * rows + positions // length
        selected = hidden.reshape(length * rows, -1).index_select(0, index)
        if self.scalar:
            values: torch.Tensor = self.output_layer(selected)
            return values
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(selected.unsqueeze(1), weight=weight)[0]
        return logits.squeeze(1)


def unwrap(model: Any) -> HeadlessGPT:
    """The model inside its wrappers."""
    while not isinstance(model, HeadlessGPT):
        model = model.module
    return model
