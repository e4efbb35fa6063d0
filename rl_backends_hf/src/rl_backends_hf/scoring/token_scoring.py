"""Log-probabilities of given tokens, or of the top k, of a causal LM, computed from hidden states in chunks of its LM head.

The logits of N positions over a vocabulary of size V are the largest tensor of a language model. Here, at most `chunk` rows of
them exist at one time, in the forward and the backward pass, which recomputes them. Gradients are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from rl_backends_base import ScoringInput
from rl_backends_base.microbatches import outside_sets
from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_core.data.generation_io import SampledSets, select_sets
from rl_core.errors import NotSupportedError


class TokenScoring(ScoringModel):
    """A causal LM that returns log-probabilities of tokens and never all logits at once.

    Args:
        model: the causal LM.
        chunk_tokens: number of positions for which logits exist at one time.
        temperature: logits are divided by it.
        vocab_size: number of rows of the LM head that are used, from the first; None for all.

    Raises:
        NotSupportedError: the model has no plain LM head on a backbone.
    """

    column = "logprobs"
    shift = 1
    extra_forward_methods = (*ScoringModel.extra_forward_methods, "topk")

    def __init__(
        self, model: PreTrainedModel, *, chunk_tokens: int, temperature: float = 1.0, vocab_size: int | None = None
    ) -> None:
        super().__init__(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.base_model is model:
            raise NotSupportedError(
                f"{type(model).__name__} has no linear LM head on a backbone "
                f"({type(head).__name__} on {type(model.base_model).__name__}), so its log-probabilities cannot be "
                "computed in chunks. Use a Transformers causal LM with `lm_head`."
            )
        self.transform = logit_transform(model.config, temperature=temperature)
        self.chunk_tokens, self._used_rows = chunk_tokens, vocab_size

    @property
    def vocab_size(self) -> int:
        """V, number of used rows of the LM head."""
        size: int = self.model.get_output_embeddings().out_features
        return min(size, self._used_rows or size)

    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [V, H] and bias [V] of the LM head."""
        head = self.model.get_output_embeddings()
        if self._used_rows is None:
            return head.weight, head.bias
        return head.weight[: self._used_rows], None if head.bias is None else head.bias[: self._used_rows]

    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor, sets: SampledSets | None = None) -> torch.Tensor:
        """Log-probability [M] or [M, 1 + K] float32, in nats, of each target given its hidden state."""
        weight, bias = self._head()
        return chunked_token_logprobs(
            hidden, weight, bias, targets, transform=self.transform, chunk=self.chunk_tokens, sets=sets
        )

    def topk(
        self, input_ids: torch.Tensor, hidden_index: torch.Tensor, attention: Mapping[str, Any], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [M, k] int64 and log-probabilities [M, k] float32, in nats, of the most likely tokens; see `ScoringInput`."""
        hidden, (weight, bias) = self.hidden_states(input_ids, hidden_index, attention), self._head()
        nothing, head = hidden_index.new_empty(len(hidden), 0), partial(nn.functional.linear, weight=weight, bias=bias)
        return chunked_scores(hidden, head, nothing, k=k, transform=self.transform, chunk=self.chunk_tokens)

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


_CPU_ROWS: Final = 32
"""Rows of logits that a CPU reads or changes at one time: they stay in its cache between the operations on them."""


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """Scaling and soft cap that a model family applies to the LM head's output, followed by the temperature.

    logits = cap * tanh(scale * raw / cap) / temperature, in float32; no cap if `softcap` is None.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] float32 of the head's output [n, V]; may overwrite it."""
        logits = raw.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Derivative of the logits with respect to the head's output: a number, or [n, V] float32."""
        constant = self.scale / self.temperature
        if self.softcap is None:
            return constant
        # Logits of -inf, outside a set, have no slope.
        return (logits * (self.temperature / self.softcap)).clamp_(min=-1.0).square_().neg_().add_(1.0).mul_(constant)


def chunked_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    transform: LogitTransform,
    chunk: int,
    sets: SampledSets | None = None,
) -> torch.Tensor:
    """Log-probability of each target token, in nats; several targets per position cost one pass.

    Args:
        hidden: [N, H] last hidden states, one per predicted token.
        weight: [V, H] of the LM head; may be the embedding's.
        bias: [V] of the LM head, or None.
        targets: [N] int64 token ids, or [N, C] with C ids per position.
        transform: from the head's output to logits.
        chunk: rows of logits that exist at one time.
        sets: of the N positions: probabilities are those among the tokens of a set, and targets outside it have -inf.

    Returns:
        [N] or [N, C] float32, differentiable in `hidden`, `weight` and `bias`.
    """
    several = targets if targets.ndim == 2 else targets.unsqueeze(1)
    logprobs: torch.Tensor = _ChunkedTokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, several, transform, chunk, sets
    )
    return logprobs if targets.ndim == 2 else logprobs.squeeze(1).clone()  # FSDP2 warns of outputs that are views


def chunked_scores(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    *,
    k: int,
    transform: LogitTransform,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target tokens, then the `k` most likely ones, most likely first, from one pass over the logits, without a gradient.

    Args:
        hidden: [N, H] last hidden states, one per predicted token.
        head: the LM head: from [n, H] to [n, V].
        targets: [N, C] int64 with C token ids per position; C may be 0.
        k: number of most likely tokens; may be 0.
        transform: from the head's output to logits.
        chunk: rows of logits that exist at one time.

    Returns:
        Token ids [N, C + k] int64 and their log-probabilities [N, C + k] float32, in nats.
    """
    shape = len(hidden), targets.shape[1] + k
    ids, logprobs = targets.new_empty(shape), hidden.new_empty(shape, dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = transform(head(hidden[rows]))
            top, likely = torch.topk(logits, k, dim=-1)
            ids[rows] = torch.cat([targets[rows], likely], dim=1)
            logprobs[rows] = torch.cat([logits.gather(1, targets[rows]), top], dim=1) - _log_normalizer(logits)
    return ids, logprobs


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transform: LogitTransform) -> torch.Tensor:
    return transform(torch.nn.functional.linear(hidden, weight, bias))


def _among(sets: SampledSets | None, rows: slice, logits: torch.Tensor) -> torch.Tensor:
    """`logits` [n, V] of some rows, with -inf outside their sets."""
    return logits if sets is None else logits.masked_fill_(outside_sets(select_sets(sets, rows), logits), float("-inf"))


class _ChunkedTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        chunk: int,
        sets: SampledSets | None,
    ) -> torch.Tensor:
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        normalizer = hidden.new_empty(len(hidden), 1, dtype=torch.float32)
        logits = None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _among(sets, rows, _logits(hidden[rows], weight, bias, transform))
            normalizer[rows] = _log_normalizer(logits)
            logprobs[rows] = logits.gather(1, targets[rows]) - normalizer[rows]
        # A single chunk fits into memory anyway; keeping it saves its recomputation in the backward pass.
        saved_logits = logits if len(hidden) <= chunk and any(ctx.needs_input_grad[:3]) else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, saved_logits)
        ctx.transform, ctx.chunk, ctx.sets = transform, chunk, sets
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, saved_logits = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        several = len(hidden) > ctx.chunk
        # Sums over chunks are float32, so that chunking does not reduce the precision of a bfloat16 head.
        sum_dtype = torch.float32 if several else weight.dtype
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if needs_bias and bias is not None else None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = saved_logits
            if logits is None:
                logits = _among(ctx.sets, rows, _logits(hidden[rows], weight, bias, ctx.transform))
            raw = _to_grad_of_raw(logits, normalizer[rows], targets[rows], grad[rows], ctx.transform).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(raw, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, raw, hidden[rows])
            if grad_bias is not None:
                grad_bias += raw.sum(0, dtype=sum_dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _few_rows(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of each of some tensors [n, ...], few at a time on a CPU."""
    rows = _CPU_ROWS if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    return zip(*(each.split(rows) for each in tensors), strict=True)


def _log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """[n, 1], the log-sum-exp of logits [n, V]."""
    return torch.cat([torch.logsumexp(rows, dim=-1, keepdim=True) for (rows,) in _few_rows(logits)])


def _to_grad_of_raw(
    logits: torch.Tensor,
    normalizer: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    transform: LogitTransform,
) -> torch.Tensor:
    """Gradient [n, V] float32 of the head's output: sum over targets of grad * (one-hot of the target - softmax) * slope.

    It replaces the logits: autograd refuses a second backward pass, in which they would be wrong.
    """
    for few, normalizers, own_targets, own_grad in _few_rows(logits, normalizer, targets, grad):
        slope = transform.slope(few)
        few.sub_(normalizers).exp_().mul_(-own_grad.sum(dim=1, keepdim=True))
        few.scatter_add_(1, own_targets, own_grad).mul_(slope)
    return logits


def _add_product(total: torch.Tensor, raw: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add raw^T hidden to `total` [V, H]."""
    if total.dtype == raw.dtype:
        total.addmm_(raw.t(), hidden)
    else:
        total += raw.t() @ hidden
