"""Checks around every call of `train` of a run's models, whatever the algorithm and the loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.facades import PolicyFacade
from rl_core.errors import BrokenPromiseError, NonFiniteError
from rl_core.interfaces.policy import LossFunction, TrainableInterface
from rl_train.rollouts.schedule import stale_mask
from rl_train.training_checks.agreement import LARGEST, Agreement, Numbers, disagreement
from rl_train.training_checks.checked_loss import (
    COMPARISON,
    PREFIX,
    ROW_NUMBERS,
    WITH_ENGINE,
    WITH_SCORES,
    CheckedLoss,
    ExpectedCounts,
    Limits,
    sums_to_hold,
)
from rl_train.training_checks.gradients import (
    NEGLIGIBLE,
    OBSERVED,
    GradientLoss,
    WeightChanges,
    check_accumulation,
    check_observed,
    has_gradient,
    is_certain_to_change,
    is_expected_to_change,
)
from rl_train.weight_sync.synchronizer import WeightSynchronizer

_log = logging.getLogger("rlcore")

CANARY_PERIOD = 10
"""Steps without sampled tokens between two canaries."""
ENOUGH_TOKENS = 256
"""A step with fewer comparable tokens, because older weights sampled others, runs the canary."""
_HELD = "The step was not taken, so the weights are unchanged."
_TAKEN = "The step was taken, because its rows did not differ in an evaluation or on each rank alone; it is not saved."
_TAKEN_WITH_NAN = "The policy took the step although its loss was NaN, so its weights are unusable: it must refuse such a step."


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
    key: str = field(default_factory=lambda: uuid4().hex)
    _tried: bool = field(default=False, init=False)

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
        smallest, largest, reached = (result["metrics"][PREFIX + name] for name in OBSERVED)
        scale, of_rows = getattr(self.model, "facts", {}).get("gradient_scale", 1.0), expected.computed["rows"]
        check_observed(smallest, largest, reached * expected.steps, of_rows=of_rows, scale=scale, where=self._where)
        grad_norm, lr = result["grad_norm"], result["lr"]
        self.changes.check(step, grad_norm=grad_norm, lr=lr, taken=expected.steps)
        if lr > 0 and grad_norm <= NEGLIGIBLE:
            self._check_zero(rows, loss_fn, rows_per_step, result)
        self._try_gradients(rows, loss_fn.rows_per_unit, rows_per_step)
        if self.is_policy and self.checks.weights is not None and is_expected_to_change(grad_norm, lr):
            certain = is_certain_to_change(grad_norm, lr)
            self.checks.weights.sender.sent.expect_change(expected.steps, certain=certain)
        metrics = {name: number for name, number in result["metrics"].items() if not name.startswith(PREFIX)}
        return {**result, "metrics": metrics}

    @property
    def _ranks(self) -> int:
        return self.model.data_ranks if isinstance(self.model, PolicyFacade) else 1

    @property
    def _where(self) -> str:
        return f"Step {self.checks.step()}: `train` of {self.label}"

    def _try_gradients(self, rows: BatchedDataDict[Any], unit: int, rows_per_step: int) -> None:
        """In the first call: check that gradients are accumulated, with two microbatches of each rank if steps have as many."""
        if self._tried:
            return
        self._tried, size = True, rows_per_step
        if isinstance(self.model, PolicyFacade):
            section = self.model.config
            if not (section.sequence_packing.enabled or section.dynamic_batching.enabled):
                size = 2 * max(section.train_micro_batch_size // unit, 1) * unit * self._ranks
        if size <= rows_per_step:
            check_accumulation(self.train, rows.slice(0, size), unit, self._where)

    def _check_zero(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, rows_per_step: int, result: Mapping[str, Any]
    ) -> None:
        """Check that the gradient of the loss is zero, as the result says.

        Raises:
            BrokenPromiseError: it is not.
        """
        if not bool((rows[ROW_NUMBERS] > 0).any()):
            return
        loss = GradientLoss(loss_fn, is_scalar=getattr(getattr(self.model, "config", None), "head", "") == "scalar")
        projection = self.train(rows, loss, eval_mode=True, gbs=rows_per_step)["metrics"]["projection"]
        grad_norm, toks = result["grad_norm"], result["global_valid_toks"] / result["num_optimizer_steps"]
        if has_gradient(projection, valid_toks=toks, grad_norm=grad_norm):
            raise BrokenPromiseError(
                f"{self._where} reports gradient norm {grad_norm:g} with learning rate {result['lr']:g}, but the loss "
                f"{loss_fn.label} has a gradient: some tokens are trained, not masked or clipped, and have a coefficient other "
                "than 0. `train` must step with the gradient of the loss, and report its norm before clipping. Check that it "
                "calls `backward`, that the log-probabilities that it passes to the loss carry the gradient, and that no "
                "gradient is cleared before the step."
            )

    def _train(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, rows_per_step: int, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        is_stale = self.is_policy and stale_mask(rows, self.model.weight_version) is not None
        if COMPARISON not in rows:
            result = self.train(rows, CheckedLoss(loss_fn, None, model=self.key), **kwargs)
            if self.is_policy:
                self.checks.count(None, is_stale=is_stale)
            return result
        limits, first = self.checks.limits(), rows.slice(0, min(rows_per_step, rows.size))
        version = self.model.weight_version
        sums = sums_to_hold(first, limits, self._ranks)
        try:
            result = self.train(rows, CheckedLoss(loss_fn, limits, model=self.key, hold=sums), **kwargs)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"Step {self.checks.step()}: {self.label}: {error}") from error
        except NonFiniteError:
            # Held by the checks, or its own loss is not finite: without them, the next call says so.
            if "prev_logprobs" not in first:
                first["prev_logprobs"] = self.model.get_logprobs(first)["logprobs"]
            numbers = self._compare(first, loss_fn, limits, rows_per_step)
            if any(each.refused for each in numbers.values()):
                ending = _HELD if self.model.weight_version == version else _TAKEN_WITH_NAN
                raise self._disagreement(first, numbers, limits, version, ending) from None
            if (engine := numbers.get("engine")) is not None and engine.doubtful:
                self.checks.confirm(engine, self.label)
            else:
                _log.warning(
                    "step %d: a loss was not finite, but no comparison is beyond its limit. Trying again.", self.checks.step()
                )
            self.model.prepare_for_training()
            limits = self.checks.limits()
            result = self.train(rows, CheckedLoss(loss_fn, limits, model=self.key), **kwargs)
        numbers = _numbers(result, limits)
        if any(each.refused for each in numbers.values()):
            ending = _TAKEN_WITH_NAN if result["metrics"][PREFIX + "held"] > 0 else _TAKEN
            raise self._disagreement(first, numbers, limits, version, ending)
        self.checks.count(engine := numbers.get("engine"), is_stale=is_stale)
        if engine is not None and engine.doubtful and self.checks.weights is not None:
            self.checks.weights.request_canary()
        return result

    def _compare(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, limits: Limits, rows_per_step: int
    ) -> dict[str, Numbers]:
        """Compare again, without a loss and a step."""
        result = self.train(rows, CheckedLoss(loss_fn, limits, only_checks=True), eval_mode=True, gbs=rows_per_step)
        return _numbers(result, limits)

    def _disagreement(
        self, rows: BatchedDataDict[Any], numbers: Mapping[str, Numbers], limits: Limits, version: int, ending: str
    ) -> BrokenPromiseError:
        if numbers["engine"].refused and self.checks.weights is not None:
            self.checks.weights.check_sent()
        return disagreement(
            rows=rows,
            engine=numbers["engine"],
            scores=numbers.get("scores"),
            limits=limits,
            step=self.checks.step(),
            version=version,
            labels=(self.label, self.checks.engine_label),
            ending=ending,
        )

    def _rows_per_step(self, data: BatchedDataDict[Any], loss_fn: LossFunction, gbs: int | None) -> int:
        if not isinstance(self.model, PolicyFacade):
            return gbs or getattr(getattr(self.model, "config", None), "train_global_batch_size", None) or data.size
        batch_size = gbs or self.model.config.train_global_batch_size
        multiple_of = self._ranks * loss_fn.rows_per_unit
        return rows_per_optimizer_step(data.size, batch_size=batch_size, multiple_of=multiple_of)

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


def _numbers(result: Mapping[str, Any], limits: Limits) -> dict[str, Numbers]:
    """The comparisons in the result of `train`; empty if it has none, which `ExpectedCounts.check` reports."""
    metrics, steps = result.get("metrics") or {}, result.get("num_optimizer_steps") or 1
    names = [name for name in ("engine", "scores") if f"{PREFIX}{name}/sum" in metrics]
    return {name: Numbers.of(metrics, name, steps, limits) for name in names}
