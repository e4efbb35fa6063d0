"""Runs microbatches through the pipeline, and converts the last stage's output to one number per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.context_parallel import sum_over_ranks
from rl_backends_megatron.gpt import unwrap
from rl_backends_megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_topk
from rl_backends_megatron.model_inputs import ModelInput
from rl_backends_megatron.parallel import Ranks
from rl_core.backend import return_freed_memory

HeadFn = Callable[[torch.Tensor], torch.Tensor]
"""From the last stage's hidden states to logits or values of the scored tokens."""


class LogprobHead:
    """Converts the last stage's logits to log-probabilities of tokens.

    Args:
        ranks: the vocabulary is sharded over `tensor`, rows over `context`.
        vocab_size: V, without padding.
        temperature: logits are divided by it.
        chunk_tokens: number of positions for which float32 logits exist at one time.
    """

    def __init__(self, ranks: Ranks, *, vocab_size: int, temperature: float, chunk_tokens: int) -> None:
        self._ranks = ranks
        self._vocab_size, self._temperature, self._chunk = vocab_size, temperature, chunk_tokens

    def __call__(self, logits: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """Log-probabilities [b, T] float32 of a microbatch, on every rank of the stage; 0.0 for tokens that were not scored.

        Args:
            logits: [M, V' / R] of the M scored tokens.
            inputs: their microbatch; with K candidates per token, the result is [b, T, 1 + K].
        """
        picked, _ = vocab_parallel_logprobs(
            logits,
            inputs.targets,
            group=self._ranks.tensor,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk=self._chunk,
        )
        return _scatter(picked, inputs, self._ranks)

    def topk(self, logits: torch.Tensor, inputs: ModelInput, *, k: int) -> dict[str, torch.Tensor]:
        """`topk_token_ids` [b, T, k] int64 and `topk_logprobs` [b, T, k] float32 of a microbatch, on the CPU.

        They are moved to the CPU at once, because they are k times as large as the usual result.
        """
        ids, logprobs = vocab_parallel_topk(
            logits,
            k=k,
            group=self._ranks.tensor,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk=self._chunk,
        )
        return {
            "topk_token_ids": _scatter(ids, inputs, self._ranks).cpu(),
            "topk_logprobs": _scatter(logprobs, inputs, self._ranks).cpu(),
        }


class ValueHead:
    """Converts the last stage's values to values of tokens.

    Args:
        ranks: rows are sharded over `context`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, values: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """Values [b, T] float32 of a microbatch, on every rank of the stage; 0.0 for tokens that were not scored.

        Args:
            values: [M] of the M scored tokens.
            inputs: their microbatch.
        """
        return _scatter(values, inputs, self._ranks)


Head = LogprobHead | ValueHead
"""From the model's output to one number per token."""


def make_head(config: MegatronPolicyConfig, ranks: Ranks, *, vocab_size: int) -> Head:
    """The head that the section `policy` names; `vocab_size` is V, without padding."""
    if config.head == "scalar":
        return ValueHead(ranks)
    return LogprobHead(
        ranks,
        vocab_size=vocab_size,
        temperature=config.scoring_temperature,
        chunk_tokens=config.megatron_cfg.logprob_chunk_tokens,
    )


def _scatter(numbers: torch.Tensor, inputs: ModelInput, ranks: Ranks) -> torch.Tensor:
    flat = numbers.new_zeros(inputs.shape[0] * inputs.shape[1], *numbers.shape[1:]).index_put((inputs.output_index,), numbers)
    if ranks.context.size() > 1:
        flat = sum_over_ranks(flat, ranks.context)
    return flat.view(*inputs.shape, *numbers.shape[1:])


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
