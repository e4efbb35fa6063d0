"""Optimizer steps of a run, and the learning-rate schedules over them. Does not import torch.

Users count steps of the algorithm, but schedules count optimizer steps: a step may make several, and PPO makes several passes
over its rows. A named schedule without a length is as long as the run. Arguments of torch's optimizers and schedulers are
checked against its source files.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

from rl_core.config.policy_sections import SCHEDULES, rows_per_optimizer_step
from rl_core.config.schema import SchedulerConfig
from rl_train.config.schema import RunConfig, TrainingPlan
from rl_train.config.slots import find_class

LENGTH = "num_training_steps"
TRAINED = ("policy", "value")
"""Sections of models that can be trained."""


def schedule_lengths(run: RunConfig) -> dict[str, int]:
    """Optimizer steps of each schedule without a configured length, which follows the length of the run, by model."""
    return {
        model: steps.most
        for model, scheduler, steps in named_schedules(run)
        if steps is not None and LENGTH in arguments(scheduler) and scheduler.kwargs.get(LENGTH) is None
    }


def with_schedule_lengths(run: RunConfig) -> RunConfig:
    """The run with the length of each schedule that sets none: the number of optimizer steps of the run."""
    update = {}
    for model, length in schedule_lengths(run).items():
        section = getattr(run, model)
        complete = section.scheduler.model_copy(update={"kwargs": {**section.scheduler.kwargs, LENGTH: length}})
        update[model] = section.model_copy(update={"scheduler": complete})
    return run.model_copy(update=update)


def schedule_changes(run: RunConfig, before: Mapping[str, int], done: Mapping[str, int]) -> Iterator[str]:
    """How a resume with another run length changes the schedules that follow the length of the run.

    Args:
        run: the current config.
        before: what `schedule_lengths` returned when the checkpoint was written.
        done: optimizer steps at that checkpoint, by model.
    """
    for model, length in schedule_lengths(run).items():
        if before.get(model, length) == length or model not in done:
            continue
        scheduler, lr = getattr(run, model).scheduler, getattr(run, model).optimizer.kwargs.get("lr")
        now, old = (factor(scheduler, done[model], length=whole) for whole in (length, before[model]))
        unit, scale = ("", lr) if is_number(lr) else (" of its highest value", 1.0)
        yield (
            f"{model}.scheduler: the {scheduler.name} schedule follows the length of the run, which is now {length} optimizer "
            f"steps and was {before[model]}. It continues at optimizer step {done[model] + 1} with a learning rate of "
            f"{scale * now:.3g}{unit}; with the previous length it would be {scale * old:.3g}. Set "
            f"{model}.scheduler.kwargs.{LENGTH} for a schedule of a fixed length."
        )


def named_schedules(run: RunConfig) -> Iterator[tuple[str, SchedulerConfig, OptimizerSteps | None]]:
    """The named schedules of the trained models: section, schedule, and the optimizer steps of the model, None if unknown."""
    for model in TRAINED:
        section = getattr(run, model)
        if section is None or section.scheduler is None or section.scheduler.name not in SCHEDULES:
            continue
        steps = optimizer_steps(run, model)
        # A model without training steps has no schedule that could end. The algorithm decides whether that is allowed.
        if steps is None or steps.most > 0:
            yield model, section.scheduler, steps


def arguments(scheduler: SchedulerConfig) -> tuple[str, ...]:
    """The arguments of a named schedule."""
    return tuple(inspect.signature(SCHEDULES[scheduler.name]).parameters)[1:]


def factor(scheduler: SchedulerConfig, step: int, *, length: int | None = None) -> float:
    """Learning-rate factor after `step` optimizer steps. Ignores arguments that are not numbers; the backend rejects them."""
    known = {name: value for name, value in scheduler.kwargs.items() if name in arguments(scheduler) and is_number(value)}
    if LENGTH in arguments(scheduler):
        known.setdefault(LENGTH, length if length is not None else step + 1)
    return SCHEDULES[scheduler.name](step, **known)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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


OPTIM, LR_SCHEDULER = "torch.optim", "torch.optim.lr_scheduler"

UNUSABLE_OPTIMIZERS: dict[str, str] = {
    "LBFGS": "it needs a closure that recomputes the loss, which training steps do not have",
    "SparseAdam": "it needs sparse gradients, but those of language models are dense",
    "Optimizer": "it is the base class of the optimizers",
}
"""Classes of `torch.optim` that cannot train a policy, and why."""

SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
"""Schedulers of `torch.optim.lr_scheduler`, for suggestions."""

UNUSABLE_SCHEDULERS: dict[str, str] = {
    "ChainedScheduler": "it takes scheduler objects, which YAML cannot represent",
    "LRScheduler": "it is the base class of the schedulers",
    "LambdaLR": "it takes a function, which YAML cannot represent",
    "MultiplicativeLR": "it takes a function, which YAML cannot represent",
    "ReduceLROnPlateau": "it needs a metric at each step, but schedules are stepped without one",
    "SequentialLR": "it takes scheduler objects, which YAML cannot represent",
}
"""Classes of `torch.optim.lr_scheduler` that cannot be used as a schedule, and why."""

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""Additional argument of `optimizer.kwargs`: true excludes biases and norms (all one-dimensional tensors) from weight decay."""


@cache
def arguments_of(module: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The required and the optional arguments of a class of torch, without its first, the parameters or the optimizer.

    None if its signature cannot be read; then only its name is checked.
    """
    source = find_class(module, name)
    for method in () if source is None else source.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            positional = [argument.arg for argument in method.args.args]
            first_default = len(positional) - len(method.args.defaults)
            by_name = list(zip((argument.arg for argument in method.args.kwonlyargs), method.args.kw_defaults, strict=True))
            required = [*positional[2:first_default], *(key for key, default in by_name if default is None)]
            optional = [*positional[max(first_default, 2) :], *(key for key, default in by_name if default is not None)]
            return tuple(required), tuple(optional)
    return None
