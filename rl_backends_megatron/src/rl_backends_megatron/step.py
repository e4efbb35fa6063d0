"""One optimizer step over the microbatches of a global batch; knows no config and no data format.

A step is taken only when every loss and the gradient norm are known to be finite on every rank: a NaN anywhere leaves weights
and optimizer as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_backends_megatron.microbatches import ModelInput
from rl_backends_megatron.optimizer import Trainer
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scoring import LogprobHead, forward, forward_backward
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NonFiniteError
from rl_core.interfaces.loss import LossFunction, Reduction
from rl_core.interfaces.worker import GlobalCounts, StepResult

Found = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss and metrics of a microbatch."""


def optimizer_step(
    models: Sequence[Any],
    inputs: Sequence[ModelInput],
    batches: Sequence[BatchedDataDict[Any]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    trainer: Trainer | None,
    head: LogprobHead,
    ranks: Ranks,
    max_grad_norm: float | None,
) -> StepResult:
    """Add up the gradients of all microbatches and ranks, clip, and step.

    Args:
        models: this rank's chunks.
        inputs: each microbatch as the model reads it; those beyond `batches` train nothing.
        batches: each microbatch as the loss sees it.
        loss_fn: the loss.
        counts: what the global batch is normalised by.
        trainer: what steps; None to compute loss and metrics only.
        head: from logits to log-probabilities.
        ranks: the ranks.
        max_grad_norm: clip to it; None leaves the gradient.

    Raises:
        NonFiniteError: on every rank, where a loss or gradient on any rank is NaN or infinite; nothing has changed.
    """
    loss_of = _loss_of(inputs, batches, loss_fn, counts, head, ranks)
    norm = 0.0
    if trainer is None:
        answers = forward(models, inputs, lambda logits, number: loss_of(logits, number)[1])
    else:
        trainer.drop_gradients()
        answers = forward_backward(models, inputs, loss_of)
        norm = trainer.gradient_norm()
    found: list[Found] = [answer for answer in answers if answer is not None]
    losses = torch.stack([loss for loss, _ in found]).tolist() if found else []
    reduced = _reduced([metrics for _, metrics in found], loss_fn.metric_reductions)
    if ranks.any(not _finite([norm, *losses])):
        raise _non_finite(losses, trainer, ranks, norm=norm)
    lr = trainer.step(norm, max_grad_norm) if trainer is not None else 0.0
    loss, metrics = ranks.from_last_stage((sum(losses), reduced))
    return StepResult(loss=loss, grad_norm=norm, lr=lr, metrics=metrics)


def _loss_of(
    inputs: Sequence[ModelInput],
    batches: Sequence[BatchedDataDict[Any]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    head: LogprobHead,
    ranks: Ranks,
) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, Found | None]]:
    seqs = torch.tensor(counts.valid_seqs, dtype=torch.float32, device=ranks.device)
    toks = torch.tensor(counts.valid_toks, dtype=torch.float32, device=ranks.device)

    def loss_of(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, Found | None]:
        logprobs = head(logits, inputs[number])
        if number >= len(batches):
            return logprobs.sum() * 0.0, None
        loss, metrics = loss_fn(logprobs, batches[number], seqs, toks)
        return loss, (loss.detach().float(), metrics)

    return loss_of


def _reduced(metrics: Sequence[Mapping[str, torch.Tensor]], how: Mapping[str, Reduction]) -> dict[str, float]:
    """Each metric over the microbatches."""
    reducers: dict[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": torch.sum,
        "min": torch.amin,
        "max": torch.amax,
    }
    return {
        name: float(reducers[how.get(name, "sum")](torch.stack([found[name].detach().float() for found in metrics])))
        for name in (metrics[0] if metrics else ())
    }


def _finite(numbers: Sequence[float]) -> bool:
    return bool(torch.isfinite(torch.tensor(numbers)).all())


def _non_finite(losses: Sequence[float], trainer: Trainer | None, ranks: Ranks, *, norm: float) -> NonFiniteError:
    """The error that names the first offender on this rank, and drops the gradients."""
    where = "The losses of this rank are finite; the error of another rank names an offender, or a gradient overflowed."
    for number, loss in enumerate(losses, start=1):
        if not _finite([loss]):
            where = f"The loss of microbatch {number} of {len(losses)} on rank {ranks.rank} is {loss}."
            break
    step = 1
    if trainer is not None:
        trainer.drop_gradients()
        step = trainer.weight_version + 1
    return NonFiniteError(
        f"Optimizer step {step} was not taken: its gradient norm is {norm}. {where} Weights and optimizer are as they were. "
        "Look at the batch's rewards, advantages and log-probabilities; a smaller learning rate or a clipped ratio helps "
        "where they are extreme."
    )
