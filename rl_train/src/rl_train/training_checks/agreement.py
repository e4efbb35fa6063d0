"""How much the log-probabilities of engine and policy may differ for the tokens of a step.

The rule, with d = |log p of the engine - log p of the policy| for sampled tokens of the policy's current weights:

- Both sides compute in float32, without TF32 and without experts: mean d at most `EXACT_MEAN`, and that of each row at most
  `EXACT_ROW`.
- Otherwise mean d may be `MARGIN` times the median of the first `FIRST_STEPS` steps, at least `LEAST`, with the sampling error
  of the step's tokens. Beyond it, the canary decides with many rows; if it passes, the limit becomes `MARGIN` times this
  step's mean, and the canary decides again after `PAUSE` steps at the earliest.
- Always: values are finite, mean d is at most `LARGEST_MEAN` over `MEAN_TOKENS` tokens, and that of each row at most
  `LARGEST_ROW` over `ROW_TOKENS`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import BrokenPromiseError
from rl_train.logprob_agreement import TokenDifferences
from rl_train.rollouts.schedule import trained_tokens
from rl_train.training_checks.checked_loss import PREFIX, WITH_ENGINE, Limits

_log = logging.getLogger("rlcore")

EXACT_MEAN = 1e-3
EXACT_ROW = 0.1
LARGEST_MEAN = 0.5
MEAN_TOKENS = 64
LARGEST_ROW = 1.5
ROW_TOKENS = 16
MARGIN = 3.0
LEAST = 0.02
FIRST_STEPS = 5
PAUSE = 10
LARGEST = Limits(mean=LARGEST_MEAN, mean_tokens=MEAN_TOKENS, row=LARGEST_ROW, row_tokens=ROW_TOKENS)
"""The limits of any arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The result of one comparison over the first optimizer step.

    Attributes:
        tokens: number of compared tokens.
        mean: mean d in nats.
        worst_row: largest mean d of a row.
        row: number of a row beyond its limit, from 1; 0 if there is none.
        invalid: number of tokens for which d is not finite.
        refused: whether a limit that always holds is exceeded.
        doubtful: whether the limit that the canary decides about is exceeded.
    """

    tokens: int
    mean: float
    worst_row: float
    row: int
    invalid: int
    refused: bool
    doubtful: bool

    @classmethod
    def of(cls, metrics: Mapping[str, float], name: str, steps: int, limits: Limits) -> Numbers:
        """From the metrics of `CheckedLoss`, which are means over the optimizer steps or extremes."""
        value = {key: metrics[f"{PREFIX}{name}/{key}"] for key in ("sum", "tokens", "invalid", "worst", "row")}
        tokens, row, invalid = round(value["tokens"] * steps), round(value["row"]), round(value["invalid"] * steps)
        mean, enough = value["sum"] * steps / max(tokens, 1), tokens >= limits.mean_tokens
        return cls(
            tokens=tokens,
            mean=mean,
            worst_row=value["worst"],
            row=row,
            invalid=invalid,
            refused=invalid > 0 or row > 0 or (enough and mean > limits.mean),
            doubtful=enough and mean > limits.doubtful_mean(name, max(tokens, 1)),
        )


@dataclass(kw_only=True)
class Agreement:
    """The rule for one run, with what it has measured; saved in checkpoints.

    Attributes:
        sides: the arithmetic of both sides; measurements of another one are discarded.
        exact: both sides compute exactly.
        has_canary: whether a canary can decide in doubt.
        tolerance: `policy.generation.canary_tolerance`, if it is set.
    """

    sides: str
    exact: bool
    has_canary: bool
    tolerance: float | None = None
    _first: list[float] = field(default_factory=list, init=False)
    _moved: float | None = field(default=None, init=False)
    _canary_step: int | None = field(default=None, init=False)

    def limits(self, step: int) -> Limits:
        """The limits of a step."""
        if self.exact and self.tolerance is None:
            return Limits(mean=EXACT_MEAN, mean_tokens=1, row=EXACT_ROW, row_tokens=1)
        return replace(LARGEST, mean=max(LARGEST_MEAN, self.tolerance or 0.0), doubtful=self._doubtful(step))

    def _doubtful(self, step: int) -> float | None:
        paused = self._canary_step is not None and step - self._canary_step < PAUSE
        if not self.has_canary or paused or not self._first:
            return None
        baseline = self._moved if self._moved is not None else statistics.median(self._first)
        return max(MARGIN * baseline, LEAST, self.tolerance or 0.0)

    def record(self, numbers: Numbers) -> None:
        """Store the mean of a step."""
        if len(self._first) < FIRST_STEPS:
            self._first.append(numbers.mean)

    def accept(self, step: int, numbers: Numbers, canary_error: float) -> None:
        """Continue from a step that the canary has confirmed."""
        _log.warning(
            "step %d: the log-probabilities of engine and policy differ by %.3g nats on average over %d tokens, more than in "
            "the first steps. The canary passed (%.3g nats), so the run continues, and further steps are compared with this "
            "one.",
            step,
            numbers.mean,
            numbers.tokens,
            canary_error,
        )
        self._moved, self._canary_step = numbers.mean, step

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {"sides": self.sides, "first": self._first, "moved": self._moved, "canary_step": self._canary_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from the checkpoint, unless the arithmetic has changed."""
        if state["sides"] == self.sides:
            self._first, self._moved = list(state["first"]), state["moved"]
            self._canary_step = state["canary_step"]


def rule_of(limits: Limits) -> str:
    """The limits in words."""
    least = f" of {limits.row_tokens} or more tokens" if limits.row_tokens > 1 else ""
    return f"allowed: {limits.mean:g}, and {limits.row:g} in each row{least}"


def disagreement(
    *,
    rows: BatchedDataDict[Any],
    engine: Numbers,
    scores: Numbers | None,
    limits: Limits,
    step: int,
    version: int,
    labels: tuple[str, str],
    ending: str,
) -> BrokenPromiseError:
    """Find out which component computes other log-probabilities than the other two, and describe it.

    The same tokens have up to three values: the engine's, those of the policy's scoring pass and those of its training pass.

    Args:
        rows: the rows of the first optimizer step with the columns of `CheckedLoss`.
        engine: training pass against engine.
        scores: training pass against the scoring pass, if there was one.
        limits: the limits.
        step: the step.
        version: the policy's weight version.
        labels: names of the policy and of the engine.
        ending: the last sentence.
    """
    policy_label, engine_label = labels
    if engine.refused or engine.doubtful:
        numbers, what = engine, f"{engine_label} and {policy_label}"
        sides = "the log-probability that the engine returned for a sampled token, and that of the policy's training pass"
    else:
        assert scores is not None
        numbers, what = scores, f"scoring and training pass of {policy_label}"
        sides = "the log-probability of `get_logprobs`, and that of the training pass for the same token and weights"
    values = f"{numbers.invalid} values are not finite" if numbers.invalid else f"{numbers.mean:.3g} nats on average"
    return BrokenPromiseError(
        f"Step {step}: {what} disagree at weight version {version}. Over {numbers.tokens} tokens, the difference between "
        f"{sides}, is {values} ({rule_of(limits)}) and {numbers.worst_row:.3g} in the worst row"
        + (f" (row {numbers.row - 1} of the step). " if numbers.row else ". ")
        + f"{_cause(rows, engine, scores, limits, labels)} {ending}"
    )


def _cause(rows: BatchedDataDict[Any], engine: Numbers, scores: Numbers | None, limits: Limits, labels: tuple[str, str]) -> str:
    """Which of the three is wrong: the one that is not in the pair with the smallest difference."""
    policy, engine_label = labels
    if engine.tokens == 0:
        return (
            f"`train` of {policy} must pass to the loss, at position t of a row, the log-probability of token t of that row, "
            "as `get_logprobs` returns it."
        )
    # By the third: how far the other two differ, as mean and as multiple of the limit.
    pairs = {"scoring": (engine.mean, _excess(engine.mean, engine.worst_row, engine.invalid, limits))}
    if "prev_logprobs" in rows:
        by_scores = _engine_against_scores(rows)
        judged = by_scores.compared.sum(dim=-1) >= limits.row_tokens
        worst = float(torch.where(judged, _means_of_rows(by_scores), 0.0).max())
        pairs["training"] = (by_scores.mean, _excess(by_scores.mean, worst, 0, limits))
    if scores is not None:
        pairs["engine"] = (scores.mean, _excess(scores.mean, scores.worst_row, scores.invalid, limits))
    wrong = min(pairs, key=lambda name: pairs[name][1])
    mean, excess = pairs[wrong]
    if excess > 1.0:
        return (
            "No two of the log-probabilities of the engine, of `get_logprobs` and of the training pass are known to agree, so "
            f"{policy} or {engine_label} is wrong, or both. `rlcore check logprobs` compares them without training."
        )
    if wrong == "training":
        return (
            f"The policy's own `get_logprobs` agrees with the engine ({mean:.3g} nats), so the training pass of {policy} is "
            "wrong: `train` must pass to the loss, at position t of a row, the log-probability of token t of that row."
        )
    if wrong == "scoring":
        return (
            f"The training pass agrees with the engine ({mean:.3g} nats), so `get_logprobs` of {policy} is wrong: it must "
            "return the scores in the order of the rows, under the current weights and at the sampling temperature."
        )
    return (
        f"`get_logprobs` of the policy agrees with its training pass ({mean:.3g} nats), and differs from the engine as well: "
        f"{_worst_row(_engine_against_scores(rows))}. `generate` of {engine_label} must return for each sampled token its "
        "log-probability under the weights of its version, in the row and at the position of the token; and the policy must "
        "send the weights that it trains. Either the engine samples with other weights or from another distribution, or mixes "
        "up rows or positions, or the policy sent other weights, or scores at another temperature. `rlcore check logprobs` "
        "compares the two without training."
    )


def _engine_against_scores(rows: BatchedDataDict[Any]) -> TokenDifferences:
    """Differences of the tokens that are compared with the engine."""
    compared = (rows["comparison"] >= WITH_ENGINE) & trained_tokens(rows)
    return TokenDifferences(rows["input_ids"], rows["prev_logprobs"], rows["generation_logprobs"], compared=compared)


def _excess(mean: float, worst_row: float, invalid: int, limits: Limits) -> float:
    """How many times its limit a difference is."""
    if invalid or not math.isfinite(mean):
        return math.inf
    return max(mean / min(limits.mean, limits.doubtful or limits.mean), worst_row / limits.row)


def _means_of_rows(differences: TokenDifferences) -> torch.Tensor:
    """[B] mean difference of each row; infinite if a value is NaN."""
    return differences.sizes.nan_to_num(nan=torch.inf).sum(dim=-1) / differences.compared.sum(dim=-1).clamp(min=1)


def _worst_row(differences: TokenDifferences) -> str:
    """The largest difference in the worst row."""
    sizes, of_rows = differences.sizes.nan_to_num(nan=torch.inf), _means_of_rows(differences)
    row = int(of_rows.argmax())
    position = int(sizes[row].argmax())
    return (
        f"in row {row}, which is the worst with {float(of_rows[row]):.3g} nats on average, token "
        f"{int(differences.token_ids[row, position])} at position {position} has {differences.values_at((row, position))}"
    )
