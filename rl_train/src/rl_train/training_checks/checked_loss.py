"""A loss around the loss of a run: counts what the policy computes, and compares log-probabilities before the step is taken.

It runs in the policy's workers, where the loss is computed. Its numbers are metrics like those of the loss, so they are reduced
over microbatches and ranks by the policy; all of them stay on the device. A step that may be beyond a limit is held: its loss
is NaN, so every policy refuses it on all ranks, with the weights unchanged. The numbers of the whole step then decide. They
also show whether the loss of every row was computed once, with the normalizers of the whole optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.rows import global_counts
from rl_core.errors import BrokenPromiseError
from rl_core.interfaces.policy import LossFunction, Reduction
from rl_train.logprob_agreement import sampling_error
from rl_train.rollouts.schedule import trained_tokens
from rl_train.training_checks.gradients import OBSERVED, observe

ROW_NUMBERS = "row_numbers"
COMPARISON = "comparison"
WITH_SCORES = 1.0
"""Tokens of the first optimizer step, which `prev_logprobs` may be compared for."""
WITH_ENGINE = 2.0
"""Those that the engine sampled with the policy's current weights, so that `generation_logprobs` may be compared too."""
PREFIX = "checks/"
_REDUCTIONS: Mapping[str, Reduction] = {
    **dict.fromkeys(("rows", "row_sum", "tokens", "engine/sum", "engine/tokens", "scores/sum", "scores/tokens"), "sum"),
    **dict.fromkeys(("engine/invalid", "scores/invalid"), "sum"),
    **dict.fromkeys(
        ("seqs_max", "toks_max", "last_row", "engine/worst", "engine/row", "scores/worst", "scores/row", "held"), "max"
    ),
    **dict.fromkeys(("seqs_min", "toks_min", "first_row"), "min"),
    **OBSERVED,
}
_NO_ROW = 2.0**24
_ROW_WEIGHTS = 997
"""A row counts as its number modulo this, plus 1, so that sums are exact in float32 and show a row that replaces another."""
_RESULT_KEYS = ("loss", "grad_norm", "lr", "num_optimizer_steps", "global_valid_toks", "metrics")
_SUMS = ("rows", "row_sum", "tokens")
_EXTREMES = {"first_row": "min", "last_row": "max"}
_NORMALIZERS = {"seqs": "global_valid_seqs", "toks": "global_valid_toks"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest mean |difference| of log-probabilities, in nats per token.

    Attributes:
        mean: over all tokens of the step, if there are at least `mean_tokens`.
        mean_tokens: see `mean`.
        row: over the tokens of a row, if there are at least `row_tokens`.
        row_tokens: see `row`.
        doubtful: over all tokens of the step, with their sampling error, if there are at least `mean_tokens`; None without.
    """

    mean: float
    mean_tokens: int
    row: float
    row_tokens: int
    doubtful: float | None = None

    def doubtful_mean(self, name: str, tokens: int) -> float:
        """The limit of the mean over `tokens` tokens that the canary decides about, which only the engine has."""
        return math.inf if self.doubtful is None or name != "engine" else self.doubtful * sampling_error(float(tokens))


def sums_to_hold(rows: BatchedDataDict[Any], limits: Limits, ranks: int) -> dict[str, float]:
    """By comparison, the share of a rank in the sum of differences, which some rank exceeds if the step's mean is too large.

    Args:
        rows: the rows of the first optimizer step, with the columns of `CheckedLoss`.
        limits: the limits.
        ranks: number of ranks that the rows are split over.
    """
    trained, sums = trained_tokens(rows) & (rows[ROW_NUMBERS] > 0).unsqueeze(-1), {}
    for name, least in (("engine", WITH_ENGINE), ("scores", WITH_SCORES)):
        # At least one: a step in which no row has a gradient computes some rows nevertheless.
        tokens = max(int(((rows[COMPARISON] >= least) & trained).sum()), 1)
        mean = min(limits.mean, limits.doubtful_mean(name, tokens))
        sums[name] = mean * tokens / ranks if tokens >= limits.mean_tokens else math.inf
    return sums


def row_weights(row_numbers: torch.Tensor) -> torch.Tensor:
    """What each row adds to the sum that shows a row computed twice or not at all."""
    return (row_numbers % _ROW_WEIGHTS + 1).float()


class CheckedLoss(LossFunction):
    """`loss_fn` with the checks; a new one for each call of `TrainableInterface.train`.

    Args:
        loss_fn: the loss of the run.
        model: key of the model, see `observe`.
        limits: limits of the comparison; None compares nothing.
        hold: `sums_to_hold`, beyond which the step is held, as beyond the limits of rows; None holds no step.
        only_checks: compute no loss, to compare without a step; the rows must have `prev_logprobs`.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        limits: Limits | None,
        *,
        model: str = "",
        hold: Mapping[str, float] | None = None,
        only_checks: bool = False,
    ) -> None:
        self._model, self._hold = model, hold
        self.loss_fn, self._limits, self._only_checks = loss_fn, limits, only_checks
        self.loss_type, self.rows_per_unit = loss_fn.loss_type, loss_fn.rows_per_unit
        self.candidates_key, self.on_policy = loss_fn.candidates_key, loss_fn.on_policy
        own = {PREFIX + name: how for name, how in _REDUCTIONS.items()}
        self.metric_reductions = {**loss_fn.metric_reductions, **own}  # type: ignore[misc]
        self.allows_dropout = loss_fn.allows_dropout  # type: ignore[misc]
        self._so_far: dict[str, torch.Tensor] = {}

    @property
    def label(self) -> str:
        return self.loss_fn.label

    @property
    def required_keys(self) -> frozenset[str]:
        """Those of the loss, and the columns that the checks read."""
        compared = {COMPARISON, "generation_logprobs"} if self._limits is not None else set()
        return self.loss_fn.required_keys | {ROW_NUMBERS} | compared | ({"prev_logprobs"} if self._only_checks else set())

    @property
    def optional_keys(self) -> frozenset[str]:
        """Those of the loss."""
        return self.loss_fn.optional_keys

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Those of the loss."""
        return self.loss_fn.rows_with_gradient(data)

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics, and the numbers of the checks; NaN if the step is held."""
        with torch.no_grad():
            numbers = _counts(data, global_valid_seqs, global_valid_toks)
            held = torch.zeros_like(numbers["rows"])
            for name, logprobs, chosen in self._compared(data):
                numbers |= self._compare(name, next_token_logprobs.detach().float() - logprobs, chosen, data)
                if self._hold is not None:
                    so_far = self._so_far[name] = numbers[f"{name}/sum"] + self._so_far.get(name, 0.0)
                    held += numbers[f"{name}/row"] + numbers[f"{name}/invalid"] + (so_far > self._hold[name])
            numbers["held"] = held
            factor = torch.where(held > 0, torch.nan, 1.0)
        checks = {PREFIX + name: number for name, number in numbers.items()}
        if self._only_checks:
            return torch.zeros_like(factor), checks
        loss, metrics = self.loss_fn(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        loss = loss * factor
        gradient = {PREFIX + name: number for name, number in observe(loss, numbers["rows"], self._model).items()}
        return loss, {**metrics, **checks, **gradient}

    def _compared(self, data: BatchedDataDict[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What the training pass is compared with: name, log-probabilities and tokens."""
        if self._limits is None:
            return
        yield "engine", data["generation_logprobs"], data[COMPARISON] >= WITH_ENGINE
        if "prev_logprobs" in data:
            yield "scores", data["prev_logprobs"], data[COMPARISON] >= WITH_SCORES

    def _compare(
        self, name: str, difference: torch.Tensor, chosen: torch.Tensor, data: BatchedDataDict[Any]
    ) -> dict[str, torch.Tensor]:
        """Numbers of one comparison over the chosen tokens that are trained."""
        assert self._limits is not None
        limits, mask = self._limits, chosen & trained_tokens(data)
        difference = difference.abs()
        finite = torch.isfinite(difference)
        invalid = (mask & ~finite).sum().float()
        difference = torch.where(mask & finite, difference, 0.0)
        tokens = mask.sum(dim=-1)
        of_rows = difference.sum(dim=-1) / tokens.clamp(min=1)
        judged = tokens >= limits.row_tokens
        beyond = judged & (of_rows > limits.row)
        return {
            f"{name}/sum": difference.sum(),
            f"{name}/tokens": tokens.sum().float(),
            f"{name}/invalid": invalid,
            f"{name}/worst": torch.where(judged, of_rows, 0.0).max(),
            f"{name}/row": torch.where(beyond, data[ROW_NUMBERS].abs(), 0).max().float(),
        }


def counted(data: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
    """Number of rows and tokens whose loss must be computed, the sum of the rows' weights, and the first and last row.

    Args:
        data: `ROW_NUMBERS` are negative for rows that may be left out because they have no gradient.
    """
    trained = trained_tokens(data) & (data[ROW_NUMBERS] > 0).unsqueeze(-1)
    rows, numbers = trained.any(dim=-1), data[ROW_NUMBERS]
    return {
        "first_row": torch.where(rows, numbers, _NO_ROW).min().float(),
        "last_row": torch.where(rows, numbers, 0).max().float(),
        "rows": rows.sum().float(),
        "row_sum": torch.where(rows, row_weights(numbers), 0.0).sum(),
        "tokens": trained.sum().float(),
    }


def _counts(data: BatchedDataDict[Any], seqs: torch.Tensor, toks: torch.Tensor) -> dict[str, torch.Tensor]:
    device = data[ROW_NUMBERS].device
    seqs, toks = (torch.as_tensor(each, dtype=torch.float32, device=device) for each in (seqs, toks))
    return {**counted(data), "seqs_min": seqs, "seqs_max": seqs, "toks_min": toks, "toks_max": toks}


@dataclass(frozen=True, kw_only=True)
class ExpectedCounts:
    """What a call of `train` must compute.

    Attributes:
        steps: number of optimizer steps.
        computed: number of rows and tokens, the sum that shows a row computed twice, and the first and last row.
        normalizers: smallest and largest normalizer of the optimizer steps.
    """

    steps: int
    computed: Mapping[str, float]
    normalizers: Mapping[str, float]

    @classmethod
    def of(cls, rows: BatchedDataDict[Any], rows_per_step: int) -> ExpectedCounts:
        """For rows with the columns of `CheckedLoss`."""
        counts = global_counts(rows, rows_per_step)
        normalizers = {"seqs": [each.valid_seqs for each in counts], "toks": [each.valid_toks for each in counts]}
        return cls(
            steps=len(counts),
            computed={name: float(number) for name, number in counted(rows).items()},
            normalizers={
                f"{name}_{extreme.__name__}": extreme(values) for name, values in normalizers.items() for extreme in (min, max)
            },
        )

    def check(self, result: Mapping[str, Any], step: int, label: str) -> None:
        """Compare with the result of `train`.

        Raises:
            BrokenPromiseError: they differ; says what `train` must do.
        """
        if missing := [key for key in _RESULT_KEYS if key not in result]:
            raise BrokenPromiseError(
                f"Step {step}: the result of `train` of {label} has no {', '.join(f'`{key}`' for key in missing)}. See "
                "`rl_core.interfaces.policy.TrainableInterface.train` for its keys."
            )
        metrics, steps = result["metrics"], result["num_optimizer_steps"]
        if f"{PREFIX}rows" not in metrics:
            raise BrokenPromiseError(
                f"Step {step}: `train` of {label} returned no metrics of the loss. `metrics` must have the metrics that the "
                "loss returned, reduced over microbatches, ranks and optimizer steps (`LossFunction.metric_reductions`)."
            )
        if steps != self.steps:
            raise BrokenPromiseError(
                f"Step {step}: `train` of {label} reports {steps} optimizer step(s), but the batch has {self.steps}: one for "
                "every `gbs` rows."
            )
        self._check_computed({name: metrics[PREFIX + name] * self.steps for name in _SUMS}, step, label)
        self._check_extremes(metrics, step, label)
        self._check_normalizers(metrics, step, label)

    def _check_computed(self, found: Mapping[str, float], step: int, label: str) -> None:
        expected = {name: self.computed[name] for name in _SUMS}
        if all(round(found[name]) == round(number) for name, number in expected.items()):
            return
        factors = [found[name] / max(number, 1.0) for name, number in expected.items()]
        if min(factors) > 0.0 and max(factors) - min(factors) <= 1e-3 * min(factors):
            how = (
                "averages shares of a sum, or omits ranks"
                if factors[0] < 1.0
                else "adds them, or computes each row, repeatedly"
            )
            raise BrokenPromiseError(
                f"Step {step}: `train` of {label} returned {factors[0]:g} times the sums that the loss counted, such as "
                f"{found['rows']:g} instead of {expected['rows']:g} rows, so it {how}. Metrics of the loss that are not in "
                "`LossFunction.metric_reductions` must be summed over microbatches and ranks, and averaged only over optimizer "
                "steps."
            )
        rows, tokens = round(found["rows"]), round(found["tokens"])
        expected_rows, expected_tokens = round(self.computed["rows"]), round(self.computed["tokens"])
        same = " (other rows, or some of them twice)" if (rows, tokens) == (expected_rows, expected_tokens) else ""
        raise BrokenPromiseError(
            f"Step {step}: `train` of {label} computed the loss of {rows} rows with {tokens} tokens{same}, but the batch has "
            f"{expected_rows} rows with {expected_tokens} trained tokens. The loss of every row must be computed once, over "
            "all microbatches and ranks. Check how rows are split into microbatches, and how the metrics of the loss are "
            "summed."
        )

    def _check_extremes(self, metrics: Mapping[str, float], step: int, label: str) -> None:
        for name, reduction in _EXTREMES.items():
            found, expected = metrics[PREFIX + name], self.computed[name]
            if self.computed["rows"] and round(found) != round(expected):
                is_sum = metrics[PREFIX + "last_row"] > self.computed["last_row"]
                how = "sum" if is_sum else "mean, or that of one microbatch"
                raise BrokenPromiseError(
                    f"Step {step}: `train` of {label} returned {found:g} as a metric of the loss whose {reduction} over "
                    f"microbatches, ranks and optimizer steps is {expected:g}; this may be the {how}. It must reduce "
                    "metrics as `LossFunction.metric_reductions` says."
                )

    def _check_normalizers(self, metrics: Mapping[str, float], step: int, label: str) -> None:
        for key, expected in self.normalizers.items():
            found = metrics[PREFIX + key]
            if abs(found - expected) > 1e-4 * max(expected, 1.0):
                argument = _NORMALIZERS[key.partition("_")[0]]
                raise BrokenPromiseError(
                    f"Step {step}: `train` of {label} passed {argument} {found:g} to the loss, but the optimizer step has "
                    f"{expected:g}. It must be the number of the whole optimizer step, over all microbatches and ranks, so "
                    "that the sum of the losses is the loss of the batch. Check that it is not that of a microbatch or of a "
                    "rank."
                )
