"""Selects the rows that are computed in training, and combines the ranks' results.

Rows without a gradient are dropped before rows are sharded, so every rank still gets the same number of rows and microbatches,
and the remaining work is spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.replica_rows import global_counts, padding_rows
from rl_core.errors import BrokenPromiseError, NonFiniteError
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.worker import GlobalCounts, StepResult


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """The rows to compute, and what they stand for.

    Attributes:
        rows: the rows of all optimizer steps, in order.
        rows_per_step: number of rows of each optimizer step.
        counts: normalizing counts of each optimizer step, including the rows that are not computed.
        computed_toks: number of trained tokens in `rows`, by optimizer step.
    """

    rows: BatchedDataDict[Any]
    rows_per_step: int
    counts: list[GlobalCounts]
    computed_toks: list[float]

    @classmethod
    def all_of(cls, rows: BatchedDataDict[Any], rows_per_step: int) -> TrainingRows:
        """Train on all `rows`, with the counts of each optimizer step."""
        counts = global_counts(rows, rows_per_step)
        return cls(rows=rows, rows_per_step=rows_per_step, counts=counts, computed_toks=[count.valid_toks for count in counts])

    def with_gradient(self, loss_fn: LossFunction, *, multiple_of: int) -> TrainingRows:
        """The rows that must be computed: those with a gradient under `loss_fn`, which may declare others as unneeded.

        Every optimizer step keeps as many rows as the one that needs the most; the others are filled with padding rows. A step
        in which no row has a gradient still computes one unit, for the loss's metrics: its gradient is zero, and the optimizer
        takes the step.

        Args:
            loss_fn: the loss; see `LossFunction.rows_with_gradient`.
            multiple_of: data-parallel ranks times the rows that stay together.
        """
        needed = loss_fn.rows_with_gradient(self.rows)
        if needed is None:
            return self
        unit = loss_fn.rows_per_unit
        needed = needed.view(-1, unit).any(dim=1).repeat_interleave(unit)
        for start in range(0, len(needed), self.rows_per_step):
            if not needed[start : start + self.rows_per_step].any():
                first = start + self._first_trained(start) // unit * unit
                needed[first : first + unit] = True
        by_step = [part.nonzero().flatten() for part in needed.split(self.rows_per_step)]
        most = max(len(part) for part in by_step)
        rows_per_step = max(-(-most // multiple_of), 1) * multiple_of
        if rows_per_step >= self.rows_per_step:
            return self
        kept = []
        for step, part in enumerate(by_step):
            first = step * self.rows_per_step
            kept += [self.rows.select_indices(part + first), padding_rows(self.rows, first, rows_per_step - len(part))]
        rows: BatchedDataDict[Any] = BatchedDataDict.from_batches([each for each in kept if each.size])
        computed = [count.valid_toks for count in global_counts(rows, rows_per_step)]
        return TrainingRows(rows=rows, rows_per_step=rows_per_step, counts=self.counts, computed_toks=computed)

    def _first_trained(self, start: int) -> int:
        """Offset of the first row with trained tokens in the optimizer step that starts at row `start`; 0 if there is none."""
        step = self.rows.slice(start, start + self.rows_per_step)
        trained = ((step["token_mask"] > 0) & (step["sample_mask"] > 0).unsqueeze(-1)).any(dim=-1)
        return int(trained.int().argmax())

    def combine(self, results: Sequence[Sequence[StepResult]], loss_fn: LossFunction) -> dict[str, Any]:
        """The result of `TrainableInterface.train`: shares of each rank summed, then averaged over optimizer steps.

        Raises:
            NonFiniteError: a loss is NaN.
            BrokenPromiseError: a rank took another number of steps.
        """
        for rank, shares in enumerate(results):
            if len(shares) != len(self.counts):
                raise BrokenPromiseError(
                    f"`train` of the worker of data rank {rank} returned {len(shares)} results for {len(self.counts)} "
                    "optimizer steps: it must take one step for each of `counts` and return its result."
                )
        steps = [list(step) for step in zip(*results, strict=True)]
        losses = [sum(share.loss for share in step) for step in steps]
        for step, loss in enumerate(losses):
            if loss != loss:
                raise NonFiniteError(f"The loss of optimizer step {step + 1} of {len(losses)} is NaN.")
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(step[0].grad_norm for step in steps) / len(steps),
            "lr": steps[-1][0].lr,
            "num_optimizer_steps": len(steps),
            "global_valid_seqs": sum(count.valid_seqs for count in self.counts),
            "global_valid_toks": sum(count.valid_toks for count in self.counts),
            "computed_lengths": self.rows["input_lengths"].tolist(),
            "skipped_valid_toks": sum(count.valid_toks for count in self.counts) - sum(self.computed_toks),
            "metrics": self._metrics(steps, loss_fn),
        }

    def _metrics(self, steps: Sequence[Sequence[StepResult]], loss_fn: LossFunction) -> dict[str, float]:
        """Means and extremes over the optimizer steps."""
        metrics: dict[str, float] = {}
        for name in steps[0][0].metrics:
            how = loss_fn.metric_reductions.get(name, "sum")
            shares = [[share.metrics[name] for share in step] for step in steps]
            if how in ("min", "max"):
                extreme = min if how == "min" else max
                metrics[name] = extreme(extreme(step) for step in shares)
                continue
            sums = [sum(step) for step in shares]
            if how == "token_mean":
                # The loss divided by the count of all tokens.
                pairs = zip(self.counts, self.computed_toks, strict=True)
                sums = [share * (count.valid_toks / max(done, 1.0)) for share, (count, done) in zip(sums, pairs, strict=True)]
            metrics[name] = sum(sums) / len(sums)
        return metrics
