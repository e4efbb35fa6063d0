"""Token log-probabilities of a causal LM, computed in chunks of its LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_backends_hf.scoring.lm_head import LogitTransform, chunked_token_logprobs, chunked_topk_logprobs
from rl_backends_hf.scoring.scoring_model import ScoringInput, ScoringModel
from rl_core.errors import NotSupportedError


class TokenScoring(ScoringModel):
    """A causal LM that returns log-probabilities of tokens and never all logits at once.

    Args:
        model: the causal LM.
        chunk_tokens: number of positions for which logits exist at one time.
        temperature: logits are divided by it.

    Raises:
        NotSupportedError: the model has no plain LM head on a backbone.
    """

    column = "logprobs"
    shift = 1
    extra_forward_methods = (*ScoringModel.extra_forward_methods, "topk")

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, temperature: float = 1.0) -> None:
        super().__init__(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.base_model is model:
            raise NotSupportedError(
                f"{type(model).__name__} has no linear LM head on a backbone "
                f"({type(head).__name__} on {type(model.base_model).__name__}), so its log-probabilities cannot be "
                "computed in chunks. Use a Transformers causal LM with `lm_head`."
            )
        self.transform = logit_transform(model.config, temperature=temperature)
        self.chunk_tokens = chunk_tokens

    @property
    def vocab_size(self) -> int:
        """V, number of rows of the LM head."""
        size: int = self.model.get_output_embeddings().out_features
        return size

    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probability [M] or [M, 1 + K] float32, in nats, of each target given its hidden state."""
        head = self.model.get_output_embeddings()
        return chunked_token_logprobs(
            hidden, head.weight, head.bias, targets, transform=self.transform, chunk=self.chunk_tokens
        )

    def topk(
        self, input_ids: torch.Tensor, hidden_index: torch.Tensor, attention: Mapping[str, Any], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [M, k] int64 and log-probabilities [M, k] float32, in nats, of the most likely tokens; see `ScoringInput`."""
        hidden, head = self.hidden_states(input_ids, hidden_index, attention), self.model.get_output_embeddings()
        return chunked_topk_logprobs(hidden, head.weight, head.bias, k=k, transform=self.transform, chunk=self.chunk_tokens)

    def score_topk(self, microbatch: ScoringInput, k: int) -> dict[str, torch.Tensor]:
        """`topk_token_ids` [b, T, k] int64 and `topk_logprobs` [b, T, k] float32 of a microbatch, on the CPU.

        They are moved to the CPU at once, because they are k times as large as the usual result. From a GPU, they are complete
        once its stream is synchronized.
        """
        ids, logprobs = self.topk(microbatch.input_ids, microbatch.hidden_index, microbatch.attention, k)
        return {
            "topk_token_ids": microbatch.scatter(ids).to("cpu", non_blocking=True),
            "topk_logprobs": microbatch.scatter(logprobs).to("cpu", non_blocking=True),
        }


def logit_transform(config: PretrainedConfig, *, temperature: float) -> LogitTransform:
    """The scaling that the model's family applies to its logits, from the corresponding fields of Transformers configs.

    Soft capping: Gemma 2, 3 and relatives. `logits_scaling` divides (Granite), except in HyperCLOVA X, where it multiplies;
    `logit_scale` (Cohere) and `lm_head_multiplier` (Falcon-H1) multiply. The start-up probe detects anything missing here.
    """
    text = config.get_text_config(decoder=True)
    scale = float(getattr(text, "logit_scale", None) or 1.0) * float(getattr(text, "lm_head_multiplier", None) or 1.0)
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    scale = scale * scaling if text.model_type.startswith("hyperclovax") else scale / scaling
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitTransform(scale=scale, softcap=None if softcap is None else float(softcap), temperature=temperature)
