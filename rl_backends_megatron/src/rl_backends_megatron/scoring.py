"""Runs microbatches through the pipeline, and converts the last stage's output to one number per token.

Logits have their vocabulary sharded over ranks and are not gathered. With z the logits over T, m their maximum, s = sum exp(z
- m): log p(y) = z_y - m - log s. Per position, the ranks exchange a maximum and a few sums, and for the top k their own top k,
which contain the global ones. Padding columns of the vocabulary are masked. Megatron-Core's own cross entropy overwrites its
logits, counts padding columns, and takes one target per position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.autograd.function import once_differentiable

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.layers import sum_over_ranks
from rl_backends_megatron.model import unwrap
from rl_backends_megatron.model_inputs import ModelInput
from rl_backends_megatron.parallel import Ranks
from rl_core.backend import return_freed_memory

HeadFn = Callable[[torch.Tensor], torch.Tensor]
"""From the last stage's hidden states to logits or values of the scored tokens."""


class OutputHead:
    """Converts the last stage's output to one number per token: log-probabilities, or with a scalar head values.

    Args:
        config: the section `policy`.
        ranks: the vocabulary is sharded over `tensor`, rows over `context`.
        vocab_size: V, without padding.

    Attributes:
        column: name of the numbers.
    """

    def __init__(self, config: MegatronPolicyConfig, ranks: Ranks, *, vocab_size: int) -> None:
        self.column = "values" if config.head == "scalar" else "logprobs"
        self._ranks = ranks
        self._logits: dict[str, Any] = {
            "group": ranks.tensor,
            "vocab_size": min(vocab_size, config.vocab_size or vocab_size),
            "temperature": config.scoring_temperature,
            "chunk": config.megatron_cfg.logprob_chunk_tokens,
        }

    def __call__(self, output: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """Numbers [b, T] float32 of a microbatch, on every rank of the stage; 0.0 for tokens that were not scored.

        Args:
            output: logits [M, V' / R], or values [M], of the M scored tokens.
            inputs: their microbatch; with K candidates per token, the result is [b, T, 1 + K].
        """
        if self.column == "logprobs":
            output = vocab_parallel_logprobs(output, inputs.targets, **self._logits)
        return self._scatter(output, inputs)

    def topk(self, logits: torch.Tensor, inputs: ModelInput, *, k: int) -> dict[str, torch.Tensor]:
        """`topk_token_ids` [b, T, k] int64 and `topk_logprobs` [b, T, k] float32 of a microbatch, on the CPU.

        They are moved to the CPU at once, because they are k times as large as the usual result.
        """
        ids, logprobs = vocab_parallel_topk(logits, k=k, **self._logits)
        return {
            "topk_token_ids": self._scatter(ids, inputs).cpu(),
            "topk_logprobs": self._scatter(logprobs, inputs).cpu(),
        }

    def _scatter(self, numbers: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        scattered, group = inputs.scatter(numbers), self._ranks.context
        return sum_over_ranks(scattered, group) if group.size() > 1 else scattered


def forward(models: Sequence[Any], inputs: Sequence[ModelInput], read: Callable[[torch.Tensor, int], Any]) -> list[Any]:
    """Results of `read` for each microbatch's logits, without gradients; an empty list on all stages except the last.

    Args:
        models: this rank's chunks.
        inputs: the same on every rank of the pipeline.
        read: takes a microbatch's logits and index.
    """
    for model in models:
        model.eval()

    def consume(head_fn: HeadFn, number: int, hidden: torch.Tensor, non_loss_data: bool = True) -> Any:
        return read(head_fn(hidden), number)

    with torch.no_grad():
        return _run(models, inputs, consume, learn=False)


def forward_backward(
    models: Sequence[Any], inputs: Sequence[ModelInput], loss_of: Callable[[torch.Tensor, int], tuple[torch.Tensor, Any]]
) -> list[Any]:
    """Accumulate gradients of all microbatches, also over data- and context-parallel ranks.

    Args:
        models: this rank's chunks in their data-parallel wrappers.
        inputs: the same on every rank of the pipeline.
        loss_of: takes a microbatch's logits and index; returns its loss and a result.

    Returns:
        The results of `loss_of`; an empty list on all stages except the last.
    """
    for model in models:
        model.train()

    def consume(head_fn: HeadFn, number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        loss, answer = loss_of(head_fn(hidden), number)
        # A token count of zero: the gradient is not divided again.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), answer

    return _run(models, inputs, consume, learn=True)


def _run(models: Sequence[Any], inputs: Sequence[ModelInput], consume: Callable[..., Any], *, learn: bool) -> list[Any]:
    def forward_step(iterator: Iterator[tuple[int, ModelInput]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        number, each = next(iterator)
        return_freed_memory()  # of the microbatch before
        output = model(each.input_ids, each.position_ids, None, packed_seq_params=each.packing)
        return output, partial(consume, partial(unwrap(model).apply_head, positions=each.hidden_index), number)

    iterators = [enumerate(inputs) for _ in models]
    return get_forward_backward_func()(  # type: ignore[no-any-return]
        forward_step_func=forward_step,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=list(models) if len(models) > 1 else models[0],
        num_microbatches=len(inputs),
        # Sizes are sent with each microbatch; these only have to be valid.
        seq_length=inputs[0].input_ids.shape[1],
        micro_batch_size=inputs[0].input_ids.shape[0],
        forward_only=not learn,
        collect_non_loss_data=not learn,
    )


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: Any,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> torch.Tensor:
    """Log-probability of each target, in nats.

    Args:
        logits: [N, V' / R] any float type; this rank's columns, not modified.
        targets: [N] int64 token ids below `vocab_size`, or [N, C] with C per position.
        group: the R tensor-parallel ranks.
        vocab_size: V; columns from there to V' are padding.
        temperature: logits are divided by it.
        chunk: positions computed at one time, in float32.

    Returns:
        [N] or [N, C] float32, the same on every rank and differentiable in `logits`.
    """
    several = targets if targets.ndim == 2 else targets.unsqueeze(1)
    logprobs: torch.Tensor = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, several, group, vocab_size, temperature, chunk
    )
    return logprobs.view(targets.shape)


def vocab_parallel_topk(
    logits: torch.Tensor, *, k: int, group: Any, vocab_size: int, temperature: float = 1.0, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` most likely tokens at each position, most likely first.

    `k` is at most `vocab_size`; other arguments are as in `vocab_parallel_logprobs`.

    Returns:
        Token ids [N, k] int64 and their log-probabilities [N, k] float32, in nats; the same on every rank, without a gradient.
    """
    first, own_k = group.rank() * logits.size(1), min(k, logits.size(1))
    ids = torch.empty(len(logits), own_k, dtype=torch.int64, device=logits.device)
    # The last column is this rank's contribution to the normalizer, as a logarithm.
    scores = torch.empty(len(logits), own_k + 1, dtype=torch.float32, device=logits.device)
    with torch.no_grad():
        for start in range(0, len(logits), chunk):
            rows = slice(start, start + chunk)
            z = _scaled(logits[rows], vocab_size - first, temperature)
            scores[rows, :own_k], columns = z.topk(own_k, dim=1)
            scores[rows, own_k] = z.logsumexp(1)
            ids[rows] = columns + first
        all_ids, all_scores = _gather_ranks(ids, group), _gather_ranks(scores, group)
        top, index = all_scores[:, :, :own_k].flatten(1).topk(k, dim=1)
        normalizer = all_scores[:, :, own_k].logsumexp(1, keepdim=True)
        return all_ids.flatten(1).gather(1, index), top - normalizer


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: Any,
        vocab_size: int,
        temperature: float,
        chunk: int,
    ) -> torch.Tensor:
        first = group.rank() * logits.size(1)
        local = (targets >= first) & (targets < first + logits.size(1))
        column = (targets - first).clamp(0, logits.size(1) - 1)
        highest = _max_logits(logits, vocab_size - first, temperature, chunk)
        _reduce_over_ranks(highest, dist.ReduceOp.MAX, group)
        # Per position: logits of its targets, and sum of exponentials.
        sums = torch.zeros(len(logits), targets.size(1) + 1, dtype=torch.float32, device=logits.device)
        for start in range(0, len(logits), chunk):
            rows = slice(start, start + chunk)
            z = _scaled(logits[rows], vocab_size - first, temperature).sub_(highest[rows, None])
            sums[rows, :-1] = z.gather(1, column[rows]).masked_fill(~local[rows], 0.0)
            # In place: on a CPU, allocating a tensor of this size costs more than computing its sums.
            sums[rows, -1] = z.exp_().sum(1)
        _reduce_over_ranks(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[:, -1].log()
        ctx.save_for_backward(logits, column, local, highest + log_sum)
        ctx.limit, ctx.temperature, ctx.chunk = vocab_size - first, temperature, chunk
        return sums[:, :-1] - log_sum[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, column, local, normalizer = ctx.saved_tensors
        result = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p = _scaled(logits[rows], ctx.limit, ctx.temperature).sub_(normalizer[rows, None])
            part = log_p.exp_().mul_(-grad[rows].sum(1, keepdim=True))
            part.scatter_add_(1, column[rows], grad[rows] * local[rows])
            if ctx.temperature != 1.0:
                part /= ctx.temperature
            result[rows] = part
        return result, None, None, None, None, None


def _reduce_over_ranks(own: torch.Tensor, op: Any, group: Any) -> None:
    """Reduce in place over the ranks. A single rank skips it, to avoid waking threads of its process group."""
    if group.size() > 1:
        dist.all_reduce(own, op=op, group=group)


def _gather_ranks(own: torch.Tensor, group: Any) -> torch.Tensor:
    """[N, R, k] from [N, k] on each of the R ranks."""
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered, dim=1)


def _scaled(logits: torch.Tensor, limit: int, temperature: float) -> torch.Tensor:
    """[n, V' / R] float32, a copy; minus infinity in padding columns, those from `limit` on."""
    z = logits.float() / temperature if temperature != 1.0 else logits.to(torch.float32, copy=True)
    if limit < z.size(1):
        z[:, max(0, limit) :] = float("-inf")
    return z


def _max_logits(logits: torch.Tensor, limit: int, temperature: float, chunk: int) -> torch.Tensor:
    """[N] float32, the largest logit of this rank's columns; minus infinity if all of them are padding."""
    if limit <= 0 or not len(logits):
        return torch.full((len(logits),), float("-inf"), dtype=torch.float32, device=logits.device)
    return torch.cat([part.amax(1).float() / temperature for part in logits[:, :limit].split(chunk)])
