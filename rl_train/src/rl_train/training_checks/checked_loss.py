"""A loss around the loss of a run: counts what the policy computes, and compares log-probabilities before the step is taken.

It runs in the policy's workers, where the loss is computed. Its numbers are metrics like those of the loss, so they are reduced
over microbatches and ranks by the policy; all of them stay on the device. If engine and policy disagree, it makes the loss NaN:
every policy refuses such a step on all ranks, with the weights unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction, Reduction
from rl_train.logprob_agreement import sampling_error
from rl_train.weight_versions import trained_tokens

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
    **dict.fromkeys(("seqs_max", "toks_max", "engine/worst", "engine/row", "engine/refused", "engine/doubtful"), "max"),
    **dict.fromkeys(("scores/worst", "scores/row", "scores/refused", "scores/doubtful"), "max"),
    **dict.fromkeys(("seqs_min", "toks_min"), "min"),
}
_ROW_WEIGHTS = 997
"""A row counts as its number modulo this, plus 1, so that sums are exact in float32 and show a row that replaces another."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest mean |difference| of log-probabilities, in nats per token.

    Attributes:
        mean: over all tokens so far, if there are at least `mean_tokens`.
        mean_tokens: see `mean`.
        row: over the tokens of a row, if there are at least `row_tokens`.
        row_tokens: see `row`.
        doubtful: over all tokens so far, with their sampling error, if there are at least `mean_tokens`; None without.
    """

    mean: float
    mean_tokens: int
    row: float
    row_tokens: int
    doubtful: float | None = None


def row_weights(row_numbers: torch.Tensor) -> torch.Tensor:
    """What each row adds to the sum that shows a row computed twice or not at all."""
    return (row_numbers % _ROW_WEIGHTS + 1).float()


class CheckedLoss(LossFunction):
    """`loss_fn` with the checks; a new one for each call of `TrainableInterface.train`.

    Args:
        loss_fn: the loss of the run.
        limits: limits of the comparison; a step beyond them is refused. None compares nothing.
        only_checks: compute no loss and refuse nothing, to find out why a step was refused.
    """

    def __init__(self, loss_fn: LossFunction, limits: Limits | None, *, only_checks: bool = False) -> None:
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
        return self.loss_fn.required_keys | {ROW_NUMBERS} | compared

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
        """The loss and its metrics, and the numbers of the checks; NaN if the step must not be taken."""
        with torch.no_grad():
            numbers = _counts(data, global_valid_seqs, global_valid_toks)
            refused = torch.zeros_like(numbers["rows"])
            for name, logprobs, chosen in self._compared(data):
                numbers |= self._compare(name, next_token_logprobs.detach().float() - logprobs, chosen, data)
                refused += numbers[f"{name}/refused"] + numbers[f"{name}/doubtful"]
            factor = torch.where(refused > 0, torch.nan, 1.0)
        checks = {PREFIX + name: number for name, number in numbers.items()}
        if self._only_checks:
            return torch.zeros_like(factor), checks
        loss, metrics = self.loss_fn(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        return loss * factor, {**metrics, **checks}

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
        share = torch.stack([difference.sum(), tokens.sum().float()])
        so_far = self._so_far[name] = share + self._so_far.get(name, torch.zeros_like(share))
        mean, enough = so_far[0] / so_far[1].clamp(min=1), so_far[1] >= limits.mean_tokens
        beyond = judged & (of_rows > limits.row)
        refused = (invalid > 0) | (enough & (mean > limits.mean)) | beyond.any()
        allowed = (
            torch.inf
            if limits.doubtful is None or name != "engine"
            else limits.doubtful * sampling_error(so_far[1].clamp(min=1))
        )
        return {
            f"{name}/sum": share[0],
            f"{name}/tokens": share[1],
            f"{name}/invalid": invalid,
            f"{name}/worst": torch.where(judged, of_rows, 0.0).max(),
            f"{name}/row": torch.where(beyond, data[ROW_NUMBERS].abs(), 0).max().float(),
            f"{name}/refused": refused.float(),
            f"{name}/doubtful": (enough & (mean > allowed)).float(),
        }


def counted(data: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
    """Number of rows and tokens whose loss must be computed, and the sum of the rows' weights.

    Args:
        data: `ROW_NUMBERS` are negative for rows that may be left out because they have no gradient.
    """
    trained = trained_tokens(data) & (data[ROW_NUMBERS] > 0).unsqueeze(-1)
    rows = trained.any(dim=-1)
    return {
        "rows": rows.sum().float(),
        "row_sum": torch.where(rows, row_weights(data[ROW_NUMBERS]), 0.0).sum(),
        "tokens": trained.sum().float(),
    }


def _counts(data: BatchedDataDict[Any], seqs: torch.Tensor, toks: torch.Tensor) -> dict[str, torch.Tensor]:
    device = data[ROW_NUMBERS].device
    seqs, toks = (torch.as_tensor(each, dtype=torch.float32, device=device) for each in (seqs, toks))
    return {**counted(data), "seqs_min": seqs, "seqs_max": seqs, "toks_min": toks, "toks_max": toks}
