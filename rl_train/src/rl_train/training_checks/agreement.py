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
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl_train.training_checks.checked_loss import PREFIX, Limits

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
