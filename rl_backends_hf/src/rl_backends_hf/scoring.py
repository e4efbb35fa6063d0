"""One number a token: a model's backbone, then its head on the positions that count; knows neither heads nor losses.

`ScoringModel` is what is trained and what FSDP2 has as its root. `ScoringInput` is one microbatch in one of two forms:
*padded* [b, T], trimmed to its longest row, or *packed* [1, N], rows end to end with positions that restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_core.data.packed import pack_rows


@dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """One microbatch of M scored tokens.

    Attributes:
        input_ids: [b, T'] or [1, N] int64.
        attention: further arguments of the backbone: positions, and row borders for variable-length kernels.
        hidden_index: [M] int64; which of the b * T' (or N) hidden states the token's number is read from.
        targets: [M] int64; the token. Or [M, 1 + K]: the token, and K candidates in its place.
        output_index: [M] int64; where its number belongs in the flattened [b, T].
        shape: (b, T) of the microbatch as it came.
    """

    input_ids: torch.Tensor
    hidden_index: torch.Tensor
    targets: torch.Tensor
    output_index: torch.Tensor
    shape: tuple[int, int]
    attention: Mapping[str, Any] = field(default_factory=dict)

    def scatter(self, numbers: torch.Tensor) -> torch.Tensor:
        """[b, T, ...] with each of the M entries of [M, ...] in its place and 0 elsewhere; gradients flow through."""
        flat = numbers.new_zeros(self.shape[0] * self.shape[1], *numbers.shape[1:])
        return flat.index_put((self.output_index,), numbers).view(*self.shape, *numbers.shape[1:])

    def with_candidates(self, candidates: torch.Tensor) -> ScoringInput:
        """The same microbatch, to be scored for the tokens `candidates` [b, T, K] int64 as well."""
        beside = candidates.to(self.output_index.device).flatten(0, 1).index_select(0, self.output_index)
        return replace(self, targets=torch.cat([self.targets.unsqueeze(1), beside], dim=1))


def padded_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
) -> ScoringInput:
    """Rows beside each other, trimmed to the longest.

    There is no attention mask, for right padding needs none: attention is causal, so no token sees the padding behind it.
    Without a mask the causal kernels of SDPA apply.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: where the model is.
        shift: `ScoringModel.shift`.
        mask: [b, T]; tokens whose number is wanted; all that have one by default.
    """
    rows, columns = _scored_tokens(input_ids, lengths, mask, shift=shift)
    width = max(int(lengths.max()), 1)
    return ScoringInput(
        input_ids=input_ids[:, :width].to(device),
        hidden_index=(rows * width + columns - shift).to(device),
        targets=input_ids[rows, columns].to(device),
        output_index=(rows * input_ids.shape[1] + columns).to(device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
    )


def packed_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
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
        shift: `ScoringModel.shift`.
        mask: [b, T]; tokens whose number is wanted; all that have one by default.
        pad_multiple: each row takes a multiple of so many tokens.
        variable_length_kernel: the attention kernel takes the borders between rows (flash attention).
    """
    rows, columns = _scored_tokens(input_ids, lengths, mask, shift=shift)
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
        hidden_index=(packed.cu_seqlens.to(torch.int64)[rows] + columns - shift).to(device),
        targets=input_ids[rows, columns].to(device),
        output_index=(rows * input_ids.shape[1] + columns).to(device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        attention=attention,
    )


def _scored_tokens(
    input_ids: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None, *, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token to be scored; no hidden state stands `shift` before the first ones of a row."""
    column = torch.arange(input_ids.shape[1])
    wanted = (column < lengths.unsqueeze(1)) & (column >= shift)
    if mask is not None:
        wanted &= mask > 0
    rows, columns = wanted.nonzero(as_tuple=True)
    return rows, columns


class ScoringModel(nn.Module, ABC):
    """A model of Transformers that answers with one number a token.

    Args:
        model: a backbone with a head.
    """

    column: ClassVar[str]
    """What its numbers are called."""
    shift: ClassVar[int]
    """How many tokens before its own a token's number is read: 1 where it is a prediction, 0 where it is a judgement."""
    extra_forward_methods: ClassVar[tuple[str, ...]] = ()
    """Methods that compute with the weights as `forward` does; FSDP2 has to know of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, token ids that the model reads."""

    @abstractmethod
    def numbers(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head alone: [M] float32, of hidden states [M, H] and the tokens [M] whose numbers are read from them.

        A head that predicts tokens also takes several of each, [M, 1 + K], and answers with as many numbers.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_index: torch.Tensor,
        targets: torch.Tensor,
        attention: Mapping[str, Any],
    ) -> torch.Tensor:
        """The number [M] float32 of each scored token; see `ScoringInput`."""
        return self.numbers(self.hidden_states(input_ids, hidden_index, attention), targets)

    def hidden_states(self, input_ids: torch.Tensor, hidden_index: torch.Tensor, attention: Mapping[str, Any]) -> torch.Tensor:
        """The backbone alone: last hidden states [M, H]."""
        output = self.model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **attention)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, hidden_index)

    def score(self, microbatch: ScoringInput) -> torch.Tensor:
        """Numbers [b, T] (with candidates [b, T, 1 + K]) float32 of a microbatch; 0.0 where none was wanted."""
        scored = self(microbatch.input_ids, microbatch.hidden_index, microbatch.targets, microbatch.attention)
        return microbatch.scatter(scored)
