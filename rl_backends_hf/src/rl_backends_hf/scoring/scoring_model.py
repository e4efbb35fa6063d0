"""Computes one number per token: the model's backbone, then its head on selected positions.

`ScoringModel` is the module that is trained and the root of FSDP2. `ScoringInput` is one microbatch in one of three forms:
*padded* [b, T], trimmed to its longest row; *packed* [1, N], rows end to end with positions that restart; or *shared* [1, N]:
rows of a prompt follow their common prefix, which comes once.

A scalar head (`ValueScoring`) has the layout of Transformers' sequence classification: a matrix [1, H] without bias,
`score.weight`, applied to the backbone's last hidden states, as `AutoModelForSequenceClassification` creates it for
`num_labels=1`. On a causal LM it is initialized with zeros, so that all values are 0 before the first step, on every rank and
for any seed (Huang et al. 2024, https://arxiv.org/abs/2403.17031).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from rl_backends_base import scored_tokens
from rl_backends_hf.cpu_attention import share_prefixes
from rl_backends_hf.varlen_attention import VARLEN, Borders, SharedRows
from rl_core.backend import CLASSIFIER, Head, refuse_other_head
from rl_core.data.batched_data_dict import to_device
from rl_core.data.shared_prefix import pack_rows
from rl_core.errors import NotSupportedError, UserError


@dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """One microbatch with M scored tokens.

    Attributes:
        input_ids: [b, T'] or [1, N] int64.
        attention: further arguments of the backbone: positions, and sequence boundaries for variable-length kernels.
        hidden_index: [M] int64; index of the hidden state (of b * T' or N) from which the token is scored.
        targets: [M] int64, the tokens; or [M, 1 + K], each token and K candidates for its position.
        output_index: [M] int64; index of the result in the flattened [b, T].
        shape: (b, T) of the original microbatch.
        repeat: [M'] int64; which of the M results each of the M' entries of `output_index` gets, if rows share tokens; None if
            M' is M and each gets its own.
    """

    input_ids: torch.Tensor
    hidden_index: torch.Tensor
    targets: torch.Tensor
    output_index: torch.Tensor
    shape: tuple[int, int]
    attention: Mapping[str, Any] = field(default_factory=dict)
    repeat: torch.Tensor | None = None

    def scatter(self, numbers: torch.Tensor) -> torch.Tensor:
        """[b, T, ...] with the M entries of [M, ...] at their positions and 0 elsewhere; differentiable."""
        if self.repeat is not None:
            numbers = numbers.index_select(0, self.repeat)
        flat = numbers.new_zeros(self.shape[0] * self.shape[1], *numbers.shape[1:])
        return flat.index_put((self.output_index,), numbers).view(*self.shape, *numbers.shape[1:])

    def with_candidates(self, candidates: torch.Tensor) -> ScoringInput:
        """The same microbatch, with the tokens `candidates` [b, T, K] int64 scored as well."""
        extra = to_device(candidates, self.output_index.device).flatten(0, 1).index_select(0, self.output_index)
        return replace(self, targets=torch.cat([self.targets.unsqueeze(1), extra], dim=1))


def padded_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
) -> ScoringInput:
    """Padded rows, trimmed to the longest.

    Right padding needs no attention mask, because attention is causal. Without a mask, SDPA's causal kernels apply.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: device of the model.
        shift: `ScoringModel.shift`.
        mask: [b, T], tokens to score; all by default.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    width = max(int(lengths.max()), 1)
    return ScoringInput(
        input_ids=to_device(input_ids[:, :width], device),
        hidden_index=to_device(rows * width + columns - shift, device),
        targets=to_device(input_ids[rows, columns], device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
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
    variable_length_kernel: str | None = None,
) -> ScoringInput:
    """Rows packed end to end into one.

    Transformers separates them only if `position_ids` restart, *no* attention mask is given and the cache is off; otherwise,
    rows silently attend to each other.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: device of the model.
        shift: `ScoringModel.shift`.
        mask: [b, T], tokens to score; all by default.
        pad_multiple: each row is padded to a multiple of this many tokens.
        variable_length_kernel: attention function that takes sequence boundaries (`VARLEN` or flash attention), if any.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    packed = pack_rows({"input_ids": input_ids, "input_lengths": lengths}, pad_multiple=pad_multiple)
    attention: dict[str, Any] = {"position_ids": to_device(packed.position_ids, device)}
    if variable_length_kernel == VARLEN:
        lengths_in_pack = packed.cu_seqlens.diff().tolist()
        attention |= {
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "packed_rows": Borders.of(lengths_in_pack, lengths_in_pack, device),
        }
    elif variable_length_kernel is not None:
        borders = to_device(packed.cu_seqlens, device)
        attention |= {
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }
    return ScoringInput(
        input_ids=to_device(packed.input_ids, device),
        hidden_index=to_device(packed.cu_seqlens.to(torch.int64)[rows] + columns - shift, device),
        targets=to_device(input_ids[rows, columns], device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        attention=attention,
    )


def shared_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    prompt_ids: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
) -> ScoringInput:
    """Rows with the same prompt id as one sequence, with their common prefix once; see `share_prefixes`.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        prompt_ids: [b] int64.
        device: device of the model.
        shift: `ScoringModel.shift`.
        mask: [b, T], tokens to score; all by default.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    shared = share_prefixes(input_ids, lengths, prompt_ids)
    hidden, targets, repeat = shared.token_index[rows, columns - shift], input_ids[rows, columns], None
    if mask is None:
        # Tokens of a prefix are the same in all of its rows, so the head is applied to them once.
        first, repeat = _distinct(torch.stack([hidden, targets], dim=1))
        hidden, targets = hidden[first], targets[first]
    return ScoringInput(
        input_ids=to_device(shared.input_ids, device),
        hidden_index=to_device(hidden, device),
        targets=to_device(targets, device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        # Transformers passes on a mask with four axes as it is, and would create one with N * N entries otherwise.
        attention={
            "position_ids": to_device(shared.position_ids, device),
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "shared_prefix": shared if device.type == "cpu" else SharedRows.of(shared, device),
        },
        repeat=None if repeat is None else to_device(repeat, device),
    )


def _distinct(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first of each distinct row of `pairs` [M, 2], and [M] which of these each row equals."""
    distinct, inverse = torch.unique(pairs, dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(pairs), dtype=torch.int64)
    return first.scatter_reduce(0, inverse, torch.arange(len(pairs)), "amin"), inverse


class ScoringModel(nn.Module, ABC):
    """A Transformers model that returns one number per token.

    Args:
        model: a backbone with a head.
    """

    column: ClassVar[str]
    """Name of the numbers."""
    shift: ClassVar[int]
    """Offset from a token to the hidden state that scores it: 1 for next-token logits, 0 for a value head."""
    extra_forward_methods: ClassVar[tuple[str, ...]] = ("model_logits",)
    """Methods besides `forward` that compute with the weights; FSDP2 must register them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.autocast: torch.dtype | None = None
        """Data type that float32 adapters are computed in; their own by default."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, number of token ids of the model's input."""

    @abstractmethod
    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head's outputs [M] float32 for hidden states [M, H] and tokens [M].

        For next-token logits, targets may also be [M, 1 + K], and the result then has the same shape.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_index: torch.Tensor,
        targets: torch.Tensor,
        attention: Mapping[str, Any],
    ) -> torch.Tensor:
        """The number [M] float32 of each scored token; see `ScoringInput`."""
        return self.apply_head(self.hidden_states(input_ids, hidden_index, attention), targets)

    def hidden_states(self, input_ids: torch.Tensor, hidden_index: torch.Tensor, attention: Mapping[str, Any]) -> torch.Tensor:
        """The backbone's last hidden states [M, H]."""
        with torch.autocast(input_ids.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **attention)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, hidden_index)

    def model_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's own output, float32, for rows [b, T] of equal length."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits.float()
        return logits

    def score(self, microbatch: ScoringInput) -> torch.Tensor:
        """Numbers [b, T] (with candidates [b, T, 1 + K]) float32 of a microbatch; 0.0 for tokens that were not scored."""
        scored = self(microbatch.input_ids, microbatch.hidden_index, microbatch.targets, microbatch.attention)
        return microbatch.scatter(scored)


HEAD_NAME: Final = "score"


class ValueScoring(ScoringModel):
    """A model that returns its scalar head's value after each token.

    Args:
        model: a sequence classifier with one label.

    Raises:
        NotSupportedError: its head is not one row without bias on a backbone.
    """

    column = "values"
    shift = 0

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        scalar_head(model)

    @property
    def head(self) -> nn.Linear:
        """The scalar head."""
        return scalar_head(self.model)

    @property
    def vocab_size(self) -> int:
        """V, number of rows of the embedding."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Value [M] float32 of each hidden state; computed in float32, because bfloat16 has steps of about 0.01 near 2."""
        return nn.functional.linear(hidden.float(), self.head.weight.float()).squeeze(-1)


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a sequence classifier with one label.

    Raises:
        NotSupportedError: its head is not one row without bias on a backbone.
    """
    head = getattr(model, HEAD_NAME, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()} if isinstance(head, nn.Linear) else {}
    if not isinstance(head, nn.Linear) or shapes != {"weight": (1, head.in_features)} or model.base_model is model:
        raise NotSupportedError(
            f"{type(model).__name__} has no head `{HEAD_NAME}` with one row and no bias on a backbone, as decoder classifiers "
            "have (LlamaForSequenceClassification, Qwen2ForSequenceClassification...). Use a model of such a family."
        )
    return head


def prepare_head(config: PretrainedConfig, head: Head, *, name: str) -> None:
    """Check that a model can be loaded with this head, and set the head in its config.

    Args:
        config: the model's config; changed in place.
        head: `policy.head`.
        name: the model's, for errors.

    Raises:
        UserError: the model was saved with another head, or its family has no scalar head.
    """
    refuse_other_head(config, head, name=name)
    if head == "tokens":
        return
    brings_own = CLASSIFIER in " ".join(getattr(config, "auto_map", None) or ())
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not brings_own:
        raise UserError(
            f"{name} has model type {config.model_type}, for which Transformers {transformers.__version__} has no "
            f"*{CLASSIFIER}, which a scalar head requires. Use a model of a family that has one, such as llama, mistral, "
            "qwen2, qwen3, gemma2 or gemma3."
        )
    config.num_labels = 1


def init_head(model: PreTrainedModel) -> None:
    """Set a new head, which the model's folder does not have, to zeros.

    Raises:
        NotSupportedError: see `scalar_head`.
    """
    nn.init.zeros_(scalar_head(model).weight)
