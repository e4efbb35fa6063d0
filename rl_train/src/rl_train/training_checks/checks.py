"""Checks around every call of `train` of a run's models, whatever the algorithm and the loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.policy import DistributedPolicy
from rl_core.errors import BrokenPromiseError, NonFiniteError
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.trainable import TrainableInterface
from rl_train.training_checks.agreement import LARGEST, Agreement, Numbers
from rl_train.training_checks.checked_loss import (
    COMPARISON,
    PREFIX,
    ROW_NUMBERS,
    WITH_ENGINE,
    WITH_SCORES,
    CheckedLoss,
    Limits,
)
from rl_train.training_checks.counts import ExpectedCounts
from rl_train.training_checks.disagreement import disagreement
from rl_train.training_checks.weight_changes import WeightChanges, is_certain_to_change, is_expected_to_change
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_versions import stale_mask

_log = logging.getLogger("rlcore")

CANARY_PERIOD = 10
"""Steps without sampled tokens between two canaries."""
ENOUGH_TOKENS = 256
"""A step with fewer comparable tokens, because older weights sampled others, runs the canary."""


@dataclass(kw_only=True)
class TrainingChecks:
    """The checks of a run.

    Attributes:
        step: returns the current step.
        record: records metrics of the step.
        weights: weight synchronization with the engine; None if the run does not sample.
        agreement: the rule for engine and policy; None if their log-probabilities are not comparable.
        engine_label: name of the engine in errors.
    """

    step: Callable[[], int]
    record: Callable[[Mapping[str, float]], None]
    weights: WeightSynchronizer | None = None
    agreement: Agreement | None = None
    engine_label: str = "the engine"
    _compared_step: int = field(default=0, init=False)
    _trained_step: int = field(default=0, init=False)
    _uncompared: int = field(default=0, init=False)

    def watch(self, model: TrainableInterface, label: str, exits: ExitStack, *, is_policy: bool) -> None:
        """Check all calls of `model.train` until `exits` is closed.

        Args:
            model: policy or critic.
            label: its name in errors.
            exits: ends the checks.
            is_policy: whether the model is the one that the engine samples from.
        """
        watched = _Watched(
            checks=self, model=model, train=model.train, label=label, is_policy=is_policy, changes=WeightChanges(model, label)
        )
        model.train = watched.checked_train  # type: ignore[method-assign]
        exits.callback(partial(vars(model).pop, "train", None))

    def limits(self) -> Limits:
        """The limits of the current step."""
        return self.agreement.limits(self.step()) if self.agreement is not None else LARGEST

    def is_first_call(self) -> bool:
        """Whether this is the first time that the policy is trained in the current step."""
        first, self._trained_step = self._trained_step != self.step(), self.step()
        return first

    def count(self, numbers: Numbers | None, *, is_stale: bool) -> None:
        """Record a comparison; if there was none in this step, or one of too few tokens, the canary runs in the next refit.

        Args:
            numbers: the comparison.
            is_stale: whether older weights sampled some of the step's tokens, which were not compared.
        """
        if self.agreement is not None and numbers is not None and numbers.tokens:
            self._compared_step = self.step()
            self.agreement.record(numbers)
            self.record({"agreement/mean": numbers.mean, "agreement/worst_row": numbers.worst_row})
            self.record({"agreement/tokens": numbers.tokens})
            is_due = is_stale and numbers.tokens < ENOUGH_TOKENS
        elif self._compared_step != self.step():
            self._compared_step = self.step()
            is_due = is_stale or self._uncompared % CANARY_PERIOD == 0
            self._uncompared += not is_stale
        else:
            return
        if is_due and self.weights is not None:
            self.weights.request_canary()

    def confirm(self, numbers: Numbers, label: str) -> None:
        """Let the canary decide about a step that is beyond the limit for rounded arithmetic.

        Raises:
            WeightSyncError: the canary failed.
        """
        assert self.agreement is not None
        assert self.weights is not None
        _log.warning(
            "step %d: the log-probabilities of %s and %s differ by %.3g nats on average, more than in the first steps. The "
            "step was not taken; the canary decides.",
            self.step(),
            self.engine_label,
            label,
            numbers.mean,
        )
        error = self.weights.check_canary()
        self.record({"refit/canary_error": error})
        self.agreement.accept(self.step(), numbers, error)


@dataclass(kw_only=True)
class _Watched:
    """One model whose training is checked."""

    checks: TrainingChecks
    model: Any
    train: Callable[..., dict[str, Any]]
    label: str
    is_policy: bool
    changes: WeightChanges

    def checked_train(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, *, eval_mode: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """`TrainableInterface.train` with the checks."""
        if eval_mode:
            return self.train(data, loss_fn, eval_mode=True, **kwargs)
        if not isinstance(loss_fn, LossFunction) or "token_mask" not in data:
            return self.train(data, loss_fn, **kwargs)  # refused by the model
        if self.is_policy and self.checks.weights is not None:
            self.checks.record(self.checks.weights.score_canary())
        rows_per_step = self._rows_per_step(data, loss_fn, kwargs.get("gbs"))
        comparison = self._comparison(data, loss_fn, rows_per_step)
        rows = _with_columns(data, loss_fn, comparison)
        expected = ExpectedCounts.of(rows, rows_per_step)
        self.changes.before_training()
        result = self._train(rows, loss_fn, rows_per_step, kwargs)
        step = self.checks.step()
        expected.check(result, step, self.label)
        grad_norm, lr = result["grad_norm"], result["lr"]
        self.changes.check(step, grad_norm=grad_norm, lr=lr, taken=expected.steps)
        if self.is_policy and self.checks.weights is not None and is_expected_to_change(grad_norm, lr):
            certain = is_certain_to_change(grad_norm, lr)
            self.checks.weights.sent.expect_change(expected.steps, certain=certain)
        metrics = {name: number for name, number in result["metrics"].items() if not name.startswith(PREFIX)}
        return {**result, "metrics": metrics}

    def _train(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, rows_per_step: int, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        is_stale = self.is_policy and stale_mask(rows, self.model.weight_version) is not None
        if COMPARISON not in rows:
            result = self.train(rows, CheckedLoss(loss_fn, None), **kwargs)
            if self.is_policy:
                self.checks.count(None, is_stale=is_stale)
            return result
        limits, first = self.checks.limits(), rows.slice(0, min(rows_per_step, rows.size))
        version = self.model.weight_version
        try:
            result = self.train(rows, CheckedLoss(loss_fn, limits), **kwargs)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"Step {self.checks.step()}: {self.label}: {error}") from error
        except NonFiniteError:
            numbers = self._compare(first, loss_fn, limits, rows_per_step)
            if not any(each.refused or each.doubtful for each in numbers.values()):
                raise
            if any(each.refused for each in numbers.values()):
                raise self._disagreement(first, numbers, limits, version) from None
            self.checks.confirm(numbers["engine"], self.label)
            self.model.prepare_for_training()
            limits = self.checks.limits()
            result = self.train(rows, CheckedLoss(loss_fn, limits), **kwargs)
        numbers = _numbers(result)
        if any(each.refused for each in numbers.values()):
            raise self._disagreement(first, numbers, limits, version)
        self.checks.count(numbers.get("engine"), is_stale=is_stale)
        return result

    def _compare(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, limits: Limits, rows_per_step: int
    ) -> dict[str, Numbers]:
        """Compare again, without a loss and a step; finds the worst row even if no row is beyond its limit."""
        numbers = self._compare_once(rows, loss_fn, limits, rows_per_step)
        for name, each in numbers.items():
            if each.refused or each.doubtful:
                again = self._compare_once(rows, loss_fn, replace(limits, row=0.999 * each.worst_row), rows_per_step)
                numbers[name] = replace(each, row=again[name].row)
        return numbers

    def _compare_once(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, limits: Limits, rows_per_step: int
    ) -> dict[str, Numbers]:
        result = self.train(rows, CheckedLoss(loss_fn, limits, only_checks=True), eval_mode=True, gbs=rows_per_step)
        return _numbers(result)

    def _disagreement(
        self, rows: BatchedDataDict[Any], numbers: Mapping[str, Numbers], limits: Limits, version: int
    ) -> BrokenPromiseError:
        if numbers["engine"].refused and self.checks.weights is not None:
            self.checks.weights.check_sent()
        return disagreement(
            policy=self.model,
            rows=rows,
            engine=numbers["engine"],
            scores=numbers.get("scores"),
            limits=limits,
            step=self.checks.step(),
            version=version,
            labels=(self.label, self.checks.engine_label),
            taken=self.model.weight_version != version,
        )

    def _rows_per_step(self, data: BatchedDataDict[Any], loss_fn: LossFunction, gbs: int | None) -> int:
        if not isinstance(self.model, DistributedPolicy):
            return gbs or getattr(getattr(self.model, "config", None), "train_global_batch_size", None) or data.size
        batch_size = gbs or self.model.config.train_global_batch_size
        ranks = self.model.data_ranks * loss_fn.rows_per_unit
        return rows_per_optimizer_step(data.size, batch_size=batch_size, multiple_of=ranks)

    def _comparison(self, data: BatchedDataDict[Any], loss_fn: LossFunction, rows_per_step: int) -> torch.Tensor | None:
        """[B, T] what each token may be compared with: only before the weights change, and without dropout; None for none."""
        if not self.is_policy or loss_fn.allows_dropout or not self.checks.is_first_call():
            return None
        first, comparison = slice(0, rows_per_step), torch.zeros_like(data["token_mask"])
        if "prev_logprobs" in loss_fn.required_keys:
            comparison[first] = WITH_SCORES
        if self.checks.agreement is not None and {"generation_logprobs", "token_versions"} <= data.keys():
            comparison[first][data["token_versions"][first] == self.model.weight_version] = WITH_ENGINE
        return comparison if bool((comparison > 0).any()) else None


def _with_columns(data: BatchedDataDict[Any], loss_fn: LossFunction, comparison: torch.Tensor | None) -> BatchedDataDict[Any]:
    """The rows with the columns that `CheckedLoss` reads."""
    numbers, needed = torch.arange(1, data.size + 1), loss_fn.rows_with_gradient(data)
    columns: dict[str, Any] = {**data, ROW_NUMBERS: numbers if needed is None else torch.where(needed, numbers, -numbers)}
    if comparison is not None:
        columns[COMPARISON] = comparison
        columns.setdefault("generation_logprobs", torch.zeros_like(comparison))
    return BatchedDataDict(columns)


def _numbers(result: Mapping[str, Any]) -> dict[str, Numbers]:
    """The comparisons in the result of `train`; empty if it has none, which `ExpectedCounts.check` reports."""
    metrics, steps = result.get("metrics") or {}, result.get("num_optimizer_steps") or 1
    names = [name for name in ("engine", "scores") if f"{PREFIX}{name}/sum" in metrics]
    return {name: Numbers.of(metrics, name, steps) for name in names}
