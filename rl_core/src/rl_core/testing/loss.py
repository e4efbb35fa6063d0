"""Conformance of losses."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from rl_core.config.section import Section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import SCHEMA
from rl_core.dispatch.rows import global_counts
from rl_core.interfaces.policy import LossFunction
from rl_core.plugins.component import Kind
from rl_core.testing.comparisons import check_unchanged, section_of
from rl_core.testing.promises import Condition, Conformance, Found, creation, promise

_UNITS, _WIDTH, _VOCABULARY, _CANDIDATES = 6, 12, 50, 4
_READS = "test_it_reads_only_what_it_declares"
_SCALAR, _PARTS = "test_it_returns_a_scalar_and_metrics", "test_microbatches_do_not_change_the_gradient"
_LOGPROBS = "next_token_logprobs"
"""Column of the rows with the first argument of losses."""
_TOLERANCE = 2e-5
"""Relative; sums of float32 numbers in another order differ by about 1e-6."""


class _Recorded(BatchedDataDict[Any]):
    """Rows that record the names of columns which are read, or looked for, and are not there."""

    missing: frozenset[str] = frozenset()

    def __contains__(self, key: object) -> bool:
        self.missing |= {str(key)} - self.data.keys()
        return key in self.data

    def __missing__(self, key: str) -> Any:
        self.missing |= {key}
        raise KeyError(key)


class _Outcome:
    """The loss of some rows, its metrics, and its gradient with respect to the log-probabilities of each position.

    The gradient is [B, T, 1], or [B, T, 1 + K] with candidates.
    """

    def __init__(self, loss_fn: LossFunction, data: Mapping[str, Any], counts: list[torch.Tensor]) -> None:
        rows: BatchedDataDict[Any] = BatchedDataDict({key: value for key, value in data.items() if key != _LOGPROBS})
        leaves = [data[_LOGPROBS].unsqueeze(-1).clone().requires_grad_()]
        if "candidate_logprobs" in rows:
            leaves.append(rows["candidate_logprobs"].clone().requires_grad_())
            rows = BatchedDataDict({**rows, "candidate_logprobs": leaves[1]})
        returned = loss_fn(leaves[0].squeeze(-1), rows, *counts)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise Found(f"it returned {type(returned).__name__} instead of the loss and a dict of metrics.")
        loss, self.metrics = returned
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.isfinite():
            raise Found(f"it returned {loss!r} as the loss of {rows.size} rows. The loss is a finite scalar tensor.")
        self.loss = loss.detach()
        unused = [torch.zeros_like(leaf) for leaf in leaves]
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True) if loss.requires_grad else unused
        self.gradient = torch.cat([*gradients], dim=-1)


_EXCLUDING = Condition(
    text="`rows_with_gradient` is not overridden",
    holds=lambda tests: tests.registered().load().rows_with_gradient is not LossFunction.rows_with_gradient,
)


class LossConformance(Conformance[LossFunction]):
    """Promises of losses.

    Attributes:
        columns: functions that make a column which `required_keys` names and `rl_core.data.schema` does not: each is called
            with the rows, and returns the column.
        trains_last_token_only: whether `token_mask` has only the last token of each row, as for a reward model.
    """

    kind = Kind.LOSS
    minimum = 11
    columns: ClassVar[Mapping[str, Callable[[BatchedDataDict[Any]], Any]]] = {}
    trains_last_token_only: ClassVar[bool] = False

    @classmethod
    def create(cls) -> LossFunction:
        component = cls.registered()
        loss: LossFunction = component.load(expect=LossFunction)(section_of(component, Section, cls.config))
        return loss

    test_it_is_created_from_its_section = creation("It is created with its config section alone, and is a `LossFunction`.")

    @promise("It reads only columns that it declares (`required_keys`, `candidates_key`): policy workers get no others.")
    def test_it_reads_only_what_it_declares(self) -> None:
        rows = _Recorded(self._batch())
        logprobs, counts = rows.pop(_LOGPROBS), _counts(rows)
        for call in (self.subject().rows_with_gradient, lambda data: self.subject()(logprobs, data, *counts)):
            with contextlib.suppress(KeyError):
                call(rows)
        if rows.missing - self.subject().optional_keys:
            raise Found(f"it reads {', '.join(sorted(rows.missing))}. Add each column to `required_keys`, or do not read it.")

    @promise("It returns a finite scalar with a gradient, and scalar metrics without one.", after=_READS)
    def test_it_returns_a_scalar_and_metrics(self) -> str:
        outcome = self._outcome()
        if not outcome.gradient.isfinite().all() or not outcome.gradient.any():
            raise Found("the gradient of the loss with respect to the log-probabilities is zero everywhere or not finite.")
        for name, value in outcome.metrics.items():
            if not isinstance(value, torch.Tensor) or value.ndim or value.requires_grad or not value.isfinite():
                raise Found(f"the metric {name!r} is {value!r}: metrics are finite scalar tensors, detached from the graph.")
        return f"loss {float(outcome.loss):g}, metrics {', '.join(outcome.metrics)}"

    @promise("The losses of microbatches sum to the loss of the batch, and the gradient is the same.", after=_SCALAR)
    def test_microbatches_do_not_change_the_gradient(self) -> str:
        whole, parts = self._outcome(), self._parts()
        total = sum(float(part.loss) for part in parts)
        if abs(total - float(whole.loss)) > _TOLERANCE * max(1.0, abs(total)):
            raise Found(
                f"the loss of the batch is {float(whole.loss):g}, and its {len(parts)} microbatches sum to {total:g}. Divide "
                "by `global_valid_seqs` or `global_valid_toks`, not by the number of rows or tokens of the call."
            )
        _check_equal(torch.cat([part.gradient for part in parts]), whole.gradient, "the gradient of microbatches")
        return f"loss {total:g} in {len(parts)} microbatches"

    @promise("The loss is divided by the counts that it is passed: with twice the counts it is half as large.", after=_PARTS)
    def test_the_loss_is_divided_by_the_global_counts(self) -> None:
        half = self._outcome(scale=2.0)
        _check_equal(2 * half.gradient, self._outcome().gradient, "twice the gradient with doubled counts")

    @promise("Tokens outside `token_mask` and rows outside `sample_mask` have no gradient and no effect.", after=_SCALAR)
    def test_masked_tokens_have_no_effect(self) -> None:
        rows = self._batch()
        mask, whole = rows["token_mask"] * rows["sample_mask"].unsqueeze(1) > 0, self._outcome()
        if (wrong := whole.gradient[~mask]).any():
            raise Found(f"a token that is not trained has a gradient of {float(wrong.abs().max()):g}. Multiply by both masks.")
        hidden = {key: _where_trained(rows[key], mask) for key in {_LOGPROBS, *self.subject().required_keys}}
        shifted = self._outcome(hidden)
        _check_equal(shifted.gradient, whole.gradient, "the gradient with other log-probabilities of untrained tokens")
        _check_equal(shifted.loss, whole.loss, "the loss with other numbers for untrained tokens")

    @promise("Padding columns change neither loss nor gradient.", after=_SCALAR)
    def test_padding_has_no_effect(self) -> None:
        wider = self._outcome({key: _padded(value) for key, value in self._batch().items() if _has_tokens(value)})
        _check_equal(wider.gradient[:, :_WIDTH], self._outcome().gradient, "the gradient with wider padding")

    @promise("A microbatch without trained tokens has the loss 0 and no gradient.", after=_SCALAR)
    def test_a_microbatch_without_trained_tokens_has_no_loss(self) -> None:
        outcome = self._outcome({"sample_mask": torch.zeros(self._batch().size)})
        if float(outcome.loss) or outcome.gradient.any():
            raise Found(
                f"the loss is {float(outcome.loss):g} with a gradient of up to {float(outcome.gradient.abs().max()):g}."
            )

    @promise("Metrics of microbatches, combined as `metric_reductions` says, are those of the batch.", after=_PARTS)
    def test_metrics_are_combined_as_declared(self) -> str:
        whole, parts = self._outcome(), self._parts()
        for name, value in whole.metrics.items():
            reduction = self.subject().metric_reductions.get(name, "sum")
            values = torch.stack([part.metrics[name] for part in parts])
            combined = {"min": values.min(), "max": values.max()}.get(reduction, values.sum())
            if (combined - value).abs() > 10 * _TOLERANCE * max(1.0, abs(float(value))):
                raise Found(
                    f"the metric {name!r} of the batch is {float(value):g}, and that of its microbatches {float(combined):g} "
                    f"(reduction `{reduction}`). A mean must be divided by the global count, or have another reduction."
                )
        return f"{len(whole.metrics)} metrics"

    @promise("It does not change its arguments.", after=_SCALAR)
    def test_its_arguments_are_unchanged(self) -> None:
        rows = self._batch()
        logprobs, counts = rows[_LOGPROBS].clone().requires_grad_(), _counts(rows)
        check_unchanged("__call__", lambda passed: self.subject()(logprobs, passed, *counts), rows)
        if not torch.equal(logprobs.detach(), rows[_LOGPROBS]):
            raise Found("it changed the log-probabilities in place.")

    @promise("Equal calls have equal results.", after=_SCALAR)
    def test_equal_calls_have_equal_results(self) -> None:
        first, again = self._outcome(), self._outcome()
        if not torch.equal(first.gradient, again.gradient):
            raise Found("two equal calls had different gradients, so the loss keeps state or draws at random.")

    @promise("It can be pickled, because it is sent to the policy's workers, and computes the same there.", after=_SCALAR)
    def test_it_can_be_pickled(self) -> None:
        sent = pickle.loads(pickle.dumps(self.subject()))
        _check_equal(self._outcome(loss_fn=sent).gradient, self._outcome().gradient, "the gradient after pickling")

    @promise("Rows that `rows_with_gradient` excludes have no gradient.", applies=_EXCLUDING, after=_SCALAR)
    def test_excluded_rows_have_no_gradient(self) -> str:
        rows = self._batch()
        kept = self.subject().rows_with_gradient(rows)
        if kept is None:
            return "all rows may have a gradient"
        if kept.shape != (rows.size,) or kept.dtype != torch.bool:
            raise Found(
                f"rows_with_gradient returned {list(kept.shape)} {kept.dtype} for {rows.size} rows: it must be [B] bool."
            )
        if self._outcome().gradient[~kept].any():
            raise Found("a row that rows_with_gradient excludes has a gradient, which training would leave out.")
        return f"{int((~kept).sum())} of {rows.size} rows are excluded"

    def _batch(self) -> BatchedDataDict[Any]:
        """Rows, which are the same in each call."""
        loss_fn = self.subject()
        torch.manual_seed(11)
        num_rows = _UNITS * loss_fn.rows_per_unit
        lengths = torch.randint(5, _WIDTH - 1, (num_rows,))
        column = torch.arange(_WIDTH)
        first = (lengths - 1).unsqueeze(1) if self.trains_last_token_only else torch.full((num_rows, 1), 3)
        rows: BatchedDataDict[Any] = BatchedDataDict(
            input_ids=torch.where(column < lengths.unsqueeze(1), torch.randint(3, _VOCABULARY, (num_rows, _WIDTH)), 0),
            input_lengths=lengths,
            token_mask=((column >= first) & (column < lengths.unsqueeze(1))).float(),
            sample_mask=(torch.arange(num_rows) // loss_fn.rows_per_unit != 1).float(),
        )
        candidates = {loss_fn.candidates_key, "candidate_logprobs"} if loss_fn.candidates_key else set()
        for key in sorted(loss_fn.required_keys | candidates):
            if key not in rows:
                rows[key] = self._column(key, rows)
        rows[_LOGPROBS] = _made("logprobs", rows)
        return rows

    def _column(self, key: str, rows: BatchedDataDict[Any]) -> Any:
        if key in self.columns:
            return self.columns[key](rows)
        if key not in SCHEMA or SCHEMA[key].dtype not in ("float32", "int64"):
            raise Found(
                f"`required_keys` has {key!r}, which the kit cannot make. Set `columns = {{{key!r}: function of the rows}}` in "
                "the test class."
            )
        return _made(key, rows)

    def _outcome(
        self, changes: Mapping[str, Any] | None = None, *, scale: float = 1.0, loss_fn: LossFunction | None = None
    ) -> _Outcome:
        """The outcome of the batch: with other columns, the counts times `scale`, or another loss."""
        rows = self._batch()
        counts = [scale * count for count in _counts(rows)]
        return _Outcome(loss_fn or self.subject(), {**rows, **(changes or {})}, counts)

    def _parts(self) -> list[_Outcome]:
        """The outcomes of microbatches of two units."""
        rows, size = self._batch(), 2 * self.subject().rows_per_unit
        slices = (rows.slice(start, start + size) for start in range(0, rows.size, size))
        return [_Outcome(self.subject(), part, _counts(rows)) for part in slices]


def _made(key: str, rows: BatchedDataDict[Any]) -> torch.Tensor:
    """A column of the schema: log-probabilities are negative, others normally distributed; 0 on padding."""
    spec = SCHEMA[key]
    num_rows, width = rows["input_ids"].shape
    shape = (num_rows, width, _CANDIDATES)[: spec.ndim]
    if spec.dtype == "int64":
        return torch.randint(3, _VOCABULARY, shape)
    numbers = -torch.rand(shape) * 0.4 - 0.4 if spec.unit == "nats" else torch.randn(shape)
    if spec.ndim == 1:
        return numbers
    inside = (torch.arange(width) < rows["input_lengths"].unsqueeze(1)).view(num_rows, width, *[1] * (spec.ndim - 2))
    return torch.where(inside, numbers, 0.0)


def _counts(rows: BatchedDataDict[Any]) -> list[torch.Tensor]:
    [counts] = global_counts(rows, rows.size)
    return [torch.tensor(counts.valid_seqs), torch.tensor(counts.valid_toks)]


def _where_trained(value: Any, mask: torch.Tensor) -> Any:
    """A column of numbers with others for tokens that are not trained."""
    if not _has_tokens(value) or not value.is_floating_point():
        return value
    return torch.where(mask.view(*mask.shape, *[1] * (value.ndim - 2)), value, 37.0)


def _has_tokens(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2


def _padded(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(value, (*(0, 0) * (value.ndim - 2), 0, 3))


def _check_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = float((found - expected).abs().max())
    if difference > _TOLERANCE * max(1e-3, float(expected.abs().max())):
        raise Found(f"{what} differs by up to {difference:g} from {float(expected.abs().max()):g}.")
