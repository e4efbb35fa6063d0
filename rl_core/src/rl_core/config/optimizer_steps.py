"""How many optimizer steps a config asks of each model that it trains; knows no schedule and imports no torch.

Users count steps of the algorithm, and learning-rate schedules those of the optimizer: a step may make several, and PPO makes
passes over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How an algorithm trains a model, as its section says it."""

    steps: int
    """Steps in which it is trained."""
    rows: int
    """Rows of one step; the most where they vary."""
    passes: int = 1
    """Passes over the rows of a step."""
    rows_per_unit: int = 1
    """Neighbouring rows that stay together: two a pair."""
    is_exact: bool = True
    """Whether every step has so many rows."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSteps:
    """The optimizer steps of a whole run."""

    plan: TrainingPlan
    per_pass: int
    """Of one pass over a step's rows, at most."""
    is_exact: bool
    """Whether the config settles their number; else there may be fewer."""

    @property
    def most(self) -> int:
        """As many as there are, or at most are."""
        return self.plan.steps * self.plan.passes * self.per_pass

    @property
    def fewest(self) -> int:
        """As many as there are, or at least are."""
        return self.most if self.is_exact else 1

    def __str__(self) -> str:
        plan = self.plan
        passes = f" x {plan.passes} passes" if plan.passes > 1 else ""
        return f"{self.most} ({plan.steps} steps{passes} x {self.per_pass} for {plan.rows} rows)"


def rows_per_optimizer_step(rows: int, *, asked: int | None, multiple_of: int) -> int:
    """Rows of one optimizer step, filler rows included.

    Args:
        rows: of the batch.
        asked: `train_global_batch_size`; None takes all rows at once.
        multiple_of: data-parallel ranks times the rows that stay together: each rank has as many.
    """
    return -(-(asked or rows) // multiple_of) * multiple_of


def optimizer_steps(run: RunConfig, model: str) -> OptimizerSteps | None:
    """The optimizer steps of a run's model; None where it is not trained, or the algorithm's section does not say how.

    Args:
        run: the config.
        model: its section, `policy` or `value`.
    """
    section, plan = getattr(run, model), run.algorithm.training_plan(model, run)
    if section is None or plan is None:
        return None
    asked = section.train_global_batch_size
    rows = rows_per_optimizer_step(plan.rows, asked=asked, multiple_of=section.data_ranks(run.cluster) * plan.rows_per_unit)
    per_pass = -(-plan.rows // rows)
    # Parts that were made from Python have places of their own, and with them maybe more ranks.
    settled = asked is None or "cluster" in run.model_fields_set or per_pass == 1
    # Unshuffled, an epoch's last batch may be smaller.
    whole = plan.is_exact and run.data.shuffle and run.algorithm.max_num_epochs is None
    return OptimizerSteps(plan=plan, per_pass=per_pass, is_exact=settled and whole)
