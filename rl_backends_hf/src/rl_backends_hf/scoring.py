"""Token log-probabilities of a causal LM: its backbone, then its head on the positions that count; knows no loss.

`ScoringModel` is what is trained and what FSDP2 has as its root. `ScoringInput` is one microbatch in one of two forms:
*padded* [b, T], trimmed to its longest row, or *packed* [1, N], rows end to end with positions that restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_backends_hf.lm_head import LogitTransform, chunked_token_logprobs
from rl_core.data.packed import pack_rows
from rl_core.errors import NotSupportedError


@dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """One microbatch of M predicted tokens.

    Attributes:
        input_ids: [b, T'] or [1, N] int64.
        attention: further arguments of the backbone: positions, and row borders for variable-length kernels.
        predictors: [M] int64; which of the b * T' (or N) hidden states predicts the token.
        targets: [M] int64; the token.
        places: [M] int64; where its log-probability belongs in the flattened [b, T].
        shape: (b, T) of the microbatch as it came.
    """

    input_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    shape: tuple[int, int]
    attention: Mapping[str, Any] = field(default_factory=dict)

    def spread(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[b, T] float32 with each of the M log-probabilities in its place and 0.0 elsewhere; gradients flow through."""
        flat = logprobs.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), logprobs).view(self.shape)


def padded_input(
    input_ids: torch.Tensor, lengths: torch.Tensor, *, device: torch.device, mask: torch.Tensor | None = None
) -> ScoringInput:
    """Rows beside each other, trimmed to the longest.

    There is no attention mask, for right padding needs none: attention is causal, so no token sees the padding behind it.
    Without a mask the causal kernels of SDPA apply.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: where the model is.
        mask: [b, T]; tokens whose log-probability is wanted; all but the first of each row by default.
    """
    rows, columns = _wanted(input_ids, lengths, mask)
    width = max(int(lengths.max()), 1)
    return ScoringInput(
        input_ids=input_ids[:, :width].to(device),
        predictors=(rows * width + columns - 1).to(device),
        targets=input_ids[rows, columns].to(device),
        places=(rows * input_ids.shape[1] + columns).to(device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
    )


def packed_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    mask: torch.Tensor | None = None,
    pad_multiple: int = 1,
    variable_length_kernel: bool = False,
) -> ScoringInput:
    """Rows end to end in one.

    Transformers keeps them apart only where `position_ids` restart, *no* attention mask is given and the cache is off:
    otherwise rows attend to each other in silence.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: where the model is.
        mask: [b, T]; tokens whose log-probability is wanted; all but the first of each row by default.
        pad_multiple: each row takes a multiple of so many tokens.
        variable_length_kernel: the attention kernel takes the borders between rows (flash attention).
    """
    rows, columns = _wanted(input_ids, lengths, mask)
    packed = pack_rows({"input_ids": input_ids, "input_lengths": lengths}, pad_multiple=pad_multiple)
    attention: dict[str, Any] = {"position_ids": packed.position_ids.to(device)}
    if variable_length_kernel:
        borders = packed.cu_seqlens.to(device)
        attention |= {
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }
    return ScoringInput(
        input_ids=packed.input_ids.to(device),
        predictors=(packed.cu_seqlens.to(torch.int64)[rows] + columns - 1).to(device),
        targets=input_ids[rows, columns].to(device),
        places=(rows * input_ids.shape[1] + columns).to(device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        attention=attention,
    )


def _wanted(input_ids: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token to be scored; the first of a row has no predictor."""
    column = torch.arange(input_ids.shape[1])
    wanted = (column < lengths.unsqueeze(1)) & (column > 0)
    if mask is not None:
        wanted &= mask > 0
    rows, columns = wanted.nonzero(as_tuple=True)
    return rows, columns


class ScoringModel(nn.Module):
    """A causal LM that answers with log-probabilities of tokens, never with all logits.

    Args:
        model: the causal LM.
        chunk_tokens: positions of which the LM head's logits exist at one time.
        temperature: logits are divided by it.

    Raises:
        NotSupportedError: the model has no plain LM head behind a backbone.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, temperature: float = 1.0) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.base_model is model:
            raise NotSupportedError(
                f"{type(model).__name__} has no linear LM head behind a backbone "
                f"({type(head).__name__} behind {type(model.base_model).__name__}), so its log-probabilities cannot be "
                "computed in chunks. Use a causal LM of Transformers with `lm_head`."
            )
        self.model = model
        self.transform = logit_transform(model.config, temperature=temperature)
        self.chunk_tokens = chunk_tokens

    @property
    def vocab_size(self) -> int:
        """V, rows of the LM head."""
        size: int = self.model.get_output_embeddings().out_features
        return size

    def forward(
        self,
        input_ids: torch.Tensor,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        attention: Mapping[str, Any],
    ) -> torch.Tensor:
        """Log-probability [M] float32, in nats, of each target; see `ScoringInput`."""
        output = self.model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **attention)
        hidden = output.last_hidden_state
        head = self.model.get_output_embeddings()
        return chunked_token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]).index_select(0, predictors),
            head.weight,
            head.bias,
            targets,
            transform=self.transform,
            chunk=self.chunk_tokens,
        )

    def score(self, microbatch: ScoringInput) -> torch.Tensor:
        """Log-probabilities [b, T] float32 of a microbatch; 0.0 where none was wanted."""
        scored = self(microbatch.input_ids, microbatch.predictors, microbatch.targets, microbatch.attention)
        return microbatch.spread(scored)


def logit_transform(config: PretrainedConfig, *, temperature: float) -> LogitTransform:
    """What the model's family does to its logits, by the fields that families of Transformers have for it.

    Soft capping: Gemma 2, 3 and relatives. `logits_scaling` divides (Granite), save in HyperCLOVA X, where it multiplies;
    `logit_scale` (Cohere) and `lm_head_multiplier` (Falcon-H1) multiply. The start-up probe catches whatever is missing here.
    """
    text = config.get_text_config(decoder=True)
    scale = float(getattr(text, "logit_scale", None) or 1.0) * float(getattr(text, "lm_head_multiplier", None) or 1.0)
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    scale = scale * scaling if text.model_type.startswith("hyperclovax") else scale / scaling
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitTransform(scale=scale, softcap=None if softcap is None else float(softcap), temperature=temperature)
