"""Checks that the whole gradient of a loss reaches the weights, that optimizer steps change them, and that ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import BrokenPromiseError, NonFiniteError
from rl_core.interfaces.policy import LossFunction, Reduction, TrainableInterface, WeightSample
from rl_core.testing.outputs.models import NanGradientLoss
from rl_train.weight_sync.sender import STEPS

NEGLIGIBLE = 1e-9
"""A reported gradient norm up to which the gradient of the loss is computed, to see whether it is zero too."""
OBSERVED: Mapping[str, Reduction] = {"gradient/min": "min", "gradient/max": "max", "gradient/rows": "sum"}
"""Reductions of the metrics of `observe`."""
_NOTHING_SEEN = 3e38
_TOLERANCE = 1e-4
"""Relative difference of a gradient from its factor: a loss may be divided and multiplied by the same number."""
_LEAST_COEFFICIENT = 1e-2
"""Gradients that are smaller in sum than that of a token with this coefficient may be rounding errors."""
_seen: dict[str, torch.Tensor] = {}
"""Smallest and largest gradient that has reached the loss of a model in this process."""
CERTAIN = 1e-6
"""Learning rate times gradient norm (at most 1) from which a step changes some float32 weight."""
LEAST = 1e-9
"""Smaller steps may change no weight at all."""


def observe(loss: torch.Tensor, rows: torch.Tensor, model: str) -> dict[str, torch.Tensor]:
    """Metrics that the backward pass fills: a policy that reads them before it sees the gradients of earlier microbatches.

    Args:
        loss: what the policy gets.
        rows: scalar, number of rows that `loss` is computed for.
        model: key of the model, unique in this process.
    """
    if model not in _seen:
        _seen[model] = rows.new_tensor([_NOTHING_SEEN, -_NOTHING_SEEN])
    seen, reached = _seen[model], torch.zeros_like(rows)

    def record(gradient: torch.Tensor) -> None:
        gradient = gradient.detach().float().reshape(())
        seen[0], seen[1] = torch.minimum(seen[0], gradient), torch.maximum(seen[1], gradient)
        reached.copy_(rows)

    if loss.requires_grad:
        loss.register_hook(record)
    return {"gradient/min": seen[0], "gradient/max": seen[1], "gradient/rows": reached}


def check_observed(smallest: float, largest: float, rows: float, *, of_rows: float, scale: Any, where: str) -> None:
    """Check the metrics of `observe` over a step with `of_rows` rows; `rows` is 0 if they were read before the backward pass.

    Raises:
        BrokenPromiseError: the loss was scaled, or some microbatches had no backward pass.
    """
    if scale != "dynamic" and smallest <= largest and max(scale - smallest, largest - scale) > _TOLERANCE * scale:
        found = f"{smallest:g}" + (f" to {largest:g}" if largest > smallest else "")
        raise BrokenPromiseError(
            f"{where} computes the gradient of the loss times {found}, but it must be that of the loss times {scale:g}: the "
            "loss is already divided by the counts of the whole optimizer step, and the gradients of microbatches and ranks "
            "are summed. Do not divide or rescale the loss. If ranks average their gradients later, so that the loss must be "
            "multiplied by their number, declare this number as the fact `gradient_scale`; for a scaler, `dynamic`."
        )
    if 0 < round(rows) < round(of_rows):
        raise BrokenPromiseError(
            f"{where} computed the gradient of the loss of {round(rows)} rows only, but {round(of_rows)} rows have a gradient. "
            "It must run the backward pass for the loss of each microbatch."
        )


def check_accumulation(
    train: Callable[..., Mapping[str, Any]], rows: BatchedDataDict[Any], rows_per_unit: int, where: str
) -> None:
    """Check that a model refuses a step in which the gradient of the first microbatch is NaN; its weights are unchanged.

    Raises:
        BrokenPromiseError: the model reports a step.
    """
    try:
        norm = train(rows, NanGradientLoss(rows_per_unit), gbs=rows.size)["grad_norm"]
    except NonFiniteError:
        return
    raise BrokenPromiseError(
        f"{where} reports an optimizer step with gradient norm {norm:g}, in a trial after the step in which the gradient of "
        "the first microbatch is NaN. "
        + (
            "Either this gradient is lost: those of all microbatches must be added up, and cleared only after a step. Or no "
            "step is taken: it must take the optimizer steps that it reports."
            if math.isfinite(norm)
            else "It must refuse such a step with a `NonFiniteError` and leave the weights unchanged."
        )
    )


class GradientLoss(LossFunction):
    """A loss of 0 with the metric `projection`, which is 0 if the gradient of `loss_fn` is; for evaluations.

    The metric is the gradient with respect to logits, multiplied with a pseudo-random number for each token, which is equal
    after equal tokens. So terms of equal rows cancel as they do in the gradient, and others hardly ever.

    Args:
        loss_fn: the loss.
        is_scalar: whether it gets values, not log-probabilities.
    """

    def __init__(self, loss_fn: LossFunction, *, is_scalar: bool) -> None:
        self._loss_fn, self._is_scalar = loss_fn, is_scalar
        self.rows_per_unit, self.candidates_key = loss_fn.rows_per_unit, loss_fn.candidates_key

    @property
    def required_keys(self) -> frozenset[str]:
        """Those of the loss, and the tokens."""
        return self._loss_fn.required_keys | {"input_ids"}

    def __call__(
        self, next_token_logprobs: torch.Tensor, data: BatchedDataDict[Any], *counts: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """0 and the metric."""
        key = ["candidate_logprobs"] if self.candidates_key else []
        with torch.inference_mode(False), torch.enable_grad():
            batch = BatchedDataDict[Any]({name: _copy(column) for name, column in data.items()})
            scores = [each.detach().clone().requires_grad_() for each in (next_token_logprobs, *(batch[name] for name in key))]
            batch.update(zip(key, scores[1:], strict=True))
            loss, _ = self._loss_fn(scores[0], batch, *map(_copy, counts))
            found = torch.autograd.grad(loss, scores, allow_unused=True) if loss.requires_grad else [None] * len(scores)
            terms = [torch.zeros_like(x) if g is None else g for g, x in zip(found, scores, strict=True)]
        gradient, scored = (torch.cat([first.unsqueeze(-1), *more], dim=-1).detach() for first, *more in (terms, scores))
        if not self._is_scalar:
            # With p = softmax(z): dL/dz[k] = dL/dlog p[k] - p[k] * the sum of all dL/dlog p.
            gradient = gradient - scored.exp() * gradient.sum(dim=-1, keepdim=True)
        positions = torch.arange(1, gradient.shape[1] + 1, device=gradient.device).double().sqrt()
        weights = (data["input_ids"][:, : gradient.shape[1]] * positions + positions).cumsum(dim=-1).sin().unsqueeze(-1)
        projection = (weights * torch.arange(gradient.shape[-1], device=gradient.device).cos() * gradient).sum()
        return torch.zeros_like(loss), {"projection": projection.float()}


def _copy(value: Any) -> Any:
    """Autograd cannot use tensors that were created in inference mode."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def has_gradient(projection: float, *, valid_toks: float, grad_norm: float) -> bool:
    """Whether the metric of `GradientLoss` is that of a gradient that a norm of `grad_norm` cannot belong to."""
    return abs(projection) > max(_LEAST_COEFFICIENT / max(valid_toks, 1.0), 1e3 * grad_norm)


def is_expected_to_change(grad_norm: float, lr: float) -> bool:
    """Whether some of the following steps of this size must change a weight."""
    return lr * min(grad_norm, 1.0) >= LEAST


def is_certain_to_change(grad_norm: float, lr: float) -> bool:
    """Whether a step of this size changes some float32 weight."""
    return lr * min(grad_norm, 1.0) >= CERTAIN


class WeightChanges:
    """Compares the weights of a model before and after each call of `train`.

    Args:
        model: the model.
        label: its name in errors.
    """

    def __init__(self, model: TrainableInterface, label: str) -> None:
        self._model, self._label = model, label
        self._before: Sequence[WeightSample] | None = None
        self._unchanged = 0

    def before_training(self) -> None:
        """Sample the weights before the first step."""
        if self._before is None:
            self._before = self._samples()

    def check(self, step: int, *, grad_norm: float, lr: float, taken: int) -> None:
        """Sample the weights after `taken` optimizer steps and compare.

        Raises:
            BrokenPromiseError: a step with a gradient changed nothing, or ranks with the same shard differ.
        """
        before, self._before = self._before, self._samples()
        check_equal_ranks(self._before, f"After step {step}", self._label)
        if not before or not is_expected_to_change(grad_norm, lr):
            return
        if [each.digest for each in before] != [each.digest for each in self._before]:
            self._unchanged = 0
            return
        self._unchanged += taken
        if self._unchanged >= STEPS or (is_certain_to_change(grad_norm, lr) and all(each.exact for each in self._before)):
            raise BrokenPromiseError(
                f"Step {step}: {self._label} reports {self._unchanged} optimizer step(s), the last one with learning rate "
                f"{lr:g} and gradient norm {grad_norm:g}, but no element of a fixed sample of its weights has changed. `train` "
                "must take the optimizer steps that it reports. Check that its optimizer has the parameters of the model that "
                "it trains, and that it steps."
            )

    def _samples(self) -> Sequence[WeightSample]:
        return self._model.weight_samples() if isinstance(self._model, TrainableInterface) else ()


def check_equal_ranks(samples: Sequence[WeightSample], when: str, label: str) -> None:
    """Compare the ranks that hold the same shard.

    Raises:
        BrokenPromiseError: two of them differ.
    """
    first: dict[str, WeightSample] = {}
    for sample in samples:
        other = first.setdefault(sample.shard, sample)
        if other.digest != sample.digest:
            shard = f" ({sample.shard})" if sample.shard else ""
            raise BrokenPromiseError(
                f"{when}, the weights of {label} differ between rank {other.rank} and rank {sample.rank}, which hold the same "
                f"weights{shard}. Each rank must step with the sum of the gradients of all data-parallel ranks. Check that its "
                "ranks exchange gradients. This step is not saved."
            )
