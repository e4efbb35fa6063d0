"""Checks that a policy computed the loss of every row once, with the normalizers of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.replica_rows import global_counts
from rl_core.errors import BrokenPromiseError
from rl_train.training_checks.checked_loss import PREFIX, counted

_RESULT_KEYS = ("loss", "grad_norm", "lr", "num_optimizer_steps", "global_valid_toks", "metrics")
_SUMS = ("rows", "row_sum", "tokens")
_EXTREMES = {"first_row": "min", "last_row": "max"}
_NORMALIZERS = {"seqs": "global_valid_seqs", "toks": "global_valid_toks"}


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
                "`rl_core.interfaces.trainable.TrainableInterface.train` for its keys."
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
