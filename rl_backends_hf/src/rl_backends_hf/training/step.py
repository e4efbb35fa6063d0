"""One optimizer step over the microbatches of a global batch.

The device is synchronized only once, at the end: losses, metrics and the gradient norm are copied to the CPU in one tensor, and
only then is the step taken. A NaN anywhere therefore leaves weights and optimizer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import increment_version

from rl_backends_hf.parallel import Parallel, clip_
from rl_backends_hf.scoring.scoring_model import ScoringInput, ScoringModel
from rl_backends_hf.shards import local
from rl_backends_hf.training.dropout import training_mode
from rl_backends_hf.training.training_state import TrainingState
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
    StepResult,
    first_non_finite_loss,
    non_finite_step_error,
    reduce_metrics,
)
from rl_core.errors import NonFiniteError
from rl_core.interfaces.loss import LossFunction


def optimizer_step(
    scoring: ScoringModel,
    microbatches: Iterable[tuple[ScoringInput, BatchedDataDict[Any]]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    state: TrainingState | None,
    parallel: Parallel,
    max_grad_norm: float | None,
    stepping: AbstractContextManager[None],
) -> StepResult:
    """Accumulate the gradients of all microbatches and ranks, clip, and step.

    Args:
        scoring: the model.
        microbatches: each as model input and as batch for the loss.
        loss_fn: the loss.
        counts: normalizers of the global batch.
        state: optimizer state; None to compute loss and metrics only.
        parallel: the ranks.
        max_grad_norm: maximum gradient norm; None disables clipping.
        stepping: entered while the optimizer updates the weights.

    Raises:
        NonFiniteError: on every rank, if a loss or gradient on any rank is NaN or infinite; nothing has changed.
    """
    learn = state is not None
    if state is not None:
        state.masters.clear_gradients()
    with training_mode(scoring, learn=learn, dropout=loss_fn.allows_dropout):
        losses, metrics = _forward_backward(scoring, microbatches, loss_fn, counts, parallel=parallel, learn=learn)
    norm = torch.zeros((), device=parallel.device)
    if state is not None:
        parallel.sum_gradients(state.masters.parameters)
        norm = parallel.gradient_norm(list(state.masters.gradients().values()))
    else:
        parallel.after_forward(scoring)
    loss = torch.stack(losses).sum()
    broken = parallel.any(~(torch.isfinite(loss) & torch.isfinite(norm)))
    reduced = reduce_metrics(metrics, loss_fn.metric_reductions)
    numbers = torch.stack([broken, loss, norm, *reduced.values()]).tolist()
    if numbers[0] > 0:
        raise _non_finite(losses, state, parallel, norm=numbers[2])
    if state is not None and max_grad_norm is not None:
        clip_(list(state.masters.gradients().values()), norm, max_grad_norm)
    with stepping:
        lr = _step(state) if state is not None else 0.0
    return StepResult(loss=numbers[1], grad_norm=numbers[2], lr=lr, metrics=dict(zip(reduced, numbers[3:], strict=True)))


def _forward_backward(
    scoring: ScoringModel,
    microbatches: Iterable[tuple[ScoringInput, BatchedDataDict[Any]]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    parallel: Parallel,
    learn: bool,
) -> tuple[list[torch.Tensor], list[Mapping[str, torch.Tensor]]]:
    seqs = torch.full((), counts.valid_seqs, dtype=torch.float32, device=parallel.device)
    toks = torch.full((), counts.valid_toks, dtype=torch.float32, device=parallel.device)
    losses: list[torch.Tensor] = []
    metrics: list[Mapping[str, torch.Tensor]] = []
    with nullcontext() if learn else torch.no_grad():
        for inputs, batch in microbatches:
            loss, loss_metrics = loss_fn(_split_candidates(scoring.score(inputs), batch, loss_fn), batch, seqs, toks)
            if learn:
                loss.backward()
            losses.append(loss.detach().float())
            metrics.append(loss_metrics)
    return losses, metrics


def _split_candidates(scored: torch.Tensor, batch: BatchedDataDict[Any], loss_fn: LossFunction) -> torch.Tensor:
    """The numbers [b, T] of the rows' own tokens; those of candidates are added to the batch."""
    if loss_fn.candidates_key is None:
        return scored
    batch["candidate_logprobs"] = scored[..., 1:]
    return scored[..., 0]


def _step(state: TrainingState) -> float:
    """Take a step and return its learning rate."""
    lr = float(state.optimizer.param_groups[0]["lr"])
    state.optimizer.step()
    # Fused optimizers change parameters without counting it, but an engine that shares them checks the counts.
    increment_version(list(state.masters.parameters.values()))
    state.scheduler.step()
    state.masters.copy_to_model()
    state.masters.clear_gradients()
    state.weight_version += 1
    return lr


def _non_finite(losses: list[torch.Tensor], state: TrainingState | None, parallel: Parallel, *, norm: float) -> NonFiniteError:
    """The error for the first non-finite value on this rank; clears the gradients."""
    where = "The non-finite value is on another rank; see its error."
    broken = first_non_finite_loss(losses)
    if broken is not None:
        where = f"The loss of microbatch {broken + 1} of {len(losses)} on rank {parallel.rank} is {float(losses[broken])}."
    else:
        for name, gradient in state.masters.gradients().items() if state is not None else ():
            if not bool(torch.isfinite(local(gradient)).all()):
                where = f"The losses are finite; the first non-finite gradient on rank {parallel.rank} is that of {name}."
                break
    step = 1
    if state is not None:
        state.masters.clear_gradients()
        step = state.weight_version + 1
    return non_finite_step_error(step, where, norm=norm)
