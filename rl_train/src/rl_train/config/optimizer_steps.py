"""Number of optimizer steps of each trained model. Independent of schedules; does not import torch.

Users count steps of the algorithm, but learning-rate schedules count optimizer steps: a step may make several, and PPO makes
several passes over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerSteps:
    """Number of optimizer steps of a whole run."""

    plan: TrainingPlan
    rows: int
    """Number of rows of an optimizer step, with filler rows."""
    per_pass: int
    """Maximum number of optimizer steps in one pass over a step's rows."""
    is_exact: bool
    """Whether the config determines the number exactly; otherwise there may be fewer."""

    @property
    def most(self) -> int:
        """The number of optimizer steps, or its upper bound."""
        return self.plan.steps * self.plan.passes * self.per_pass

    @property
    def fewest(self) -> int:
        """The number of optimizer steps, or its lower bound."""
        return self.most if self.is_exact else 1

    def __str__(self) -> str:
        plan = self.plan
        passes = f" x {plan.passes} passes" if plan.passes > 1 else ""
        return f"{self.most} ({plan.steps} steps{passes} x {self.per_pass} for {plan.rows} rows)"


def optimizer_steps(run: RunConfig, model: str) -> OptimizerSteps | None:
    """The optimizer steps of a run's model; None if it is not trained, or the algorithm's section does not declare them.

    Args:
        run: the config.
        model: its section, `policy` or `value`.
    """
    section, plan = getattr(run, model), run.algorithm.training_plan(model, run)
    if section is None or plan is None:
        return None
    batch_size = section.train_global_batch_size
    rows = rows_per_optimizer_step(
        plan.rows, batch_size=batch_size, multiple_of=section.data_ranks(run.cluster) * plan.rows_per_unit
    )
    per_pass = -(-plan.rows // rows)
    # Sections created in Python have their own placement, and with it possibly more ranks.
    settled = batch_size is None or "cluster" in run.model_fields_set or per_pass == 1
    # Unshuffled, an epoch's last batch may be smaller. That of shuffled records may be too, but most have the size of `plan`.
    whole = plan.is_exact and run.data.shuffle and run.algorithm.max_num_epochs is None
    return OptimizerSteps(plan=plan, rows=rows, per_pass=per_pass, is_exact=settled and whole)
