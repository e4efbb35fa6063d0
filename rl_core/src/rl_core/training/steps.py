"""Reports of an optimizer step: metrics over its microbatches, and why it was not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rl_core.errors import NonFiniteError
from rl_core.interfaces.loss import Reduction

_EXTREMES = {"min": torch.amin, "max": torch.amax}


def reduce_metrics(metrics: Sequence[Mapping[str, torch.Tensor]], how: Mapping[str, Reduction]) -> dict[str, torch.Tensor]:
    """Each metric over the microbatches, float32, still on the device; empty if there are no microbatches.

    Args:
        metrics: of each microbatch, all with the same names.
        how: a loss's `metric_reductions`; metrics not listed are summed.
    """
    return {
        name: _EXTREMES.get(how.get(name, "sum"), torch.sum)(torch.stack([one[name].detach().float() for one in metrics]))
        for name in (metrics[0] if metrics else ())
    }


def first_non_finite_loss(losses: Sequence[float | torch.Tensor]) -> int | None:
    """Index of the first microbatch with a loss that is NaN or infinite, from 0; None if there is none."""
    return next((number for number, loss in enumerate(losses) if not torch.isfinite(torch.as_tensor(loss))), None)


def non_finite_step_error(step: int, where: str, *, norm: float) -> NonFiniteError:
    """The error of an optimizer step (the first is 1) that would not have been finite; `norm` is that of the whole gradient.

    `where` is a sentence that names the tensor at fault, or says where to look for it.
    """
    return NonFiniteError(
        f"Optimizer step {step} was not taken: its gradient norm is {norm}. {where} Weights and optimizer are unchanged. "
        "Check the batch's rewards, advantages and log-probabilities; a smaller learning rate or a clipped ratio helps "
        "if they are extreme."
    )
