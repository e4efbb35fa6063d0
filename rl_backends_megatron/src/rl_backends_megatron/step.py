"""One optimizer step over the microbatches of a global batch.

The step is taken only if all losses and the gradient norm are finite on every rank, so a NaN anywhere leaves weights and
optimizer unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rl_backends_base import first_non_finite_loss, non_finite_step_error, reduce_metrics
from rl_backends_megatron.model_inputs import ModelInput
from rl_backends_megatron.optimizer import TrainableModel
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scoring import Head, forward, forward_backward
from rl_core.backend import BatchedDataDict, GlobalCounts, StepResult
from rl_core.errors import NonFiniteError
from rl_core.interfaces.policy import LossFunction

Found = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss and metrics of a microbatch."""


def optimizer_step(
    models: Sequence[Any],
    inputs: Sequence[ModelInput],
    batches: Sequence[BatchedDataDict[Any]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    trainable: TrainableModel | None,
    head: Head,
    ranks: Ranks,
    max_grad_norm: float | None,
    stepping: AbstractContextManager[None],
) -> StepResult:
    """Accumulate the gradients of all microbatches and ranks, clip, and step.

    Args:
        models: this rank's chunks.
        inputs: each microbatch as model input; those beyond `batches` have no effect on training.
        batches: each microbatch as batch for the loss.
        loss_fn: the loss.
        counts: normalizers of the global batch.
        trainable: model and optimizer; None to compute loss and metrics only.
        head: from the model's output to one number per token.
        ranks: the ranks.
        max_grad_norm: maximum gradient norm; None disables clipping.
        stepping: entered while the optimizer updates the weights.

    Raises:
        NonFiniteError: on every rank, if a loss or gradient on any rank is NaN or infinite; nothing has changed.
    """
    loss_of = _loss_of(inputs, batches, loss_fn, counts, head, ranks)
    norm = 0.0
    if trainable is None:
        answers = forward(models, inputs, lambda logits, number: loss_of(logits, number)[1])
    else:
        trainable.clear_gradients()
        answers = forward_backward(models, inputs, loss_of)
        norm = trainable.gradient_norm()
    found: list[Found] = [answer for answer in answers if answer is not None]
    losses = torch.stack([loss for loss, _ in found]).tolist() if found else []
    reduced = reduce_metrics([metrics for _, metrics in found], loss_fn.metric_reductions)
    if ranks.any(first_non_finite_loss([norm, *losses]) is not None):
        raise _non_finite(losses, trainable, ranks, norm=norm)
    with stepping:
        lr = trainable.step(norm, max_grad_norm) if trainable is not None else 0.0
    numbers = {name: float(value) for name, value in reduced.items()}
    loss, metrics = ranks.from_last_stage((sum(losses), numbers))
    return StepResult(loss=loss, grad_norm=norm, lr=lr, metrics=metrics)


def _loss_of(
    inputs: Sequence[ModelInput],
    batches: Sequence[BatchedDataDict[Any]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    head: Head,
    ranks: Ranks,
) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, Found | None]]:
    seqs = torch.tensor(counts.valid_seqs, dtype=torch.float32, device=ranks.device)
    toks = torch.tensor(counts.valid_toks, dtype=torch.float32, device=ranks.device)

    def loss_of(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, Found | None]:
        scored = head(logits, inputs[number])
        if number >= len(batches):
            return scored.sum() * 0.0, None
        numbers, batch = _split_candidates(scored, batches[number], loss_fn)
        loss, metrics = loss_fn(numbers, batch, seqs, toks)
        return loss, (loss.detach().float(), metrics)

    return loss_of


def _split_candidates(
    scored: torch.Tensor, batch: BatchedDataDict[Any], loss_fn: LossFunction
) -> tuple[torch.Tensor, BatchedDataDict[Any]]:
    """The numbers [b, T] of the rows' own tokens, and the batch with those of candidates if the loss uses them."""
    if loss_fn.candidates_key is None:
        return scored, batch
    # In a new dict that is freed after the loss: the batches outlive the step and would keep its graphs in memory.
    return scored[..., 0], BatchedDataDict({**batch, "candidate_logprobs": scored[..., 1:]})


def _non_finite(losses: Sequence[float], trainable: TrainableModel | None, ranks: Ranks, *, norm: float) -> NonFiniteError:
    """The error for the first non-finite value on this rank; clears the gradients."""
    where = "The losses on this rank are finite; see the errors of other ranks, or a gradient overflowed."
    broken = first_non_finite_loss(losses)
    if broken is not None:
        where = f"The loss of microbatch {broken + 1} of {len(losses)} on rank {ranks.rank} is {losses[broken]}."
    step = 1
    if trainable is not None:
        trainable.clear_gradients()
        step = trainable.weight_version + 1
    return non_finite_step_error(step, where, norm=norm)
