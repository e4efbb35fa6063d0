"""Rules about the policy and its companion models: heads, lengths, batches, optimizers and learning-rate schedules.

Names and arguments of optimizers and schedules are checked without importing torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rl_core.config.diagnostics import KeyPath, Problem, dotted, show
from rl_core.config.policy_sections import SCHEDULES, OptimizerConfig, PolicyConfig, SchedulerConfig
from rl_core.config.schema import GenerationConfig
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_core.plugins.registry import Registry
from rl_train.config.foreign_names import MEANINGS
from rl_train.config.rules.rule import TRAINING, CheckedConfig, rule
from rl_train.config.schedules import (
    DECAY_MATRICES_ONLY,
    LENGTH,
    LR_SCHEDULER,
    OPTIM,
    SCHEDULERS,
    UNUSABLE_OPTIMIZERS,
    UNUSABLE_SCHEDULERS,
    arguments,
    arguments_of,
    is_number,
)
from rl_train.config.schema import RunConfig
from rl_train.config.slots import COMPANIONS, sections_at, slots_of

MODELS = ("policy", *COMPANIONS)
"""Sections of models."""


def models_of(run: RunConfig) -> dict[str, PolicyConfig]:
    """The policy and its companion models, by the key of their section: `policy`, or `teachers.math`."""
    return {dotted(path): model for slot in slots_of(Kind.POLICY) for path, model in sections_at(run, slot.path)}


def companions_of(run: RunConfig) -> dict[str, PolicyConfig]:
    """The companion models, by the key of their section."""
    return {name: model for name, model in models_of(run).items() if name != "policy"}


def model_path(name: str) -> KeyPath:
    """The key of a section of `models_of`. The name of a task may contain periods."""
    section, _, task = name.partition(".")
    return (section, task) if task else (section,)


def role_of(name: str) -> str:
    """What a model of `models_of` is: `policy`, `value` or `teacher`, which those of tasks are as well."""
    section = str(model_path(name)[0])
    return "teacher" if section == "teachers" else section


def with_models(run: RunConfig, models: Mapping[str, PolicyConfig]) -> RunConfig:
    """The run with other sections of models, by their names in `models_of`."""
    paths = {model_path(name): model for name, model in models.items()}
    teachers = {str(path[1]): model for path, model in paths.items() if len(path) > 1}
    update: dict[str, Any] = {str(path[0]): model for path, model in paths.items() if len(path) == 1}
    return run.model_copy(update=update | ({"teachers": run.teachers | teachers} if teachers else {}))


def shared_models(models: Mapping[str, PolicyConfig]) -> dict[str, str]:
    """The first model with an equal section, by name: a run loads it once."""
    return {name: next(first for first in models if models[first] == model) for name, model in models.items()}


def loaded_models(run: RunConfig) -> dict[str, PolicyConfig]:
    """The models that a run loads: those of `models_of` with different sections."""
    models = models_of(run)
    return {name: models[name] for name in shared_models(models).values()}


def each_model(config: CheckedConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """The models of a config, for rules that check each of them."""
    yield from models_of(config.run).items()


def each_companion(config: CheckedConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """The companion models of a config."""
    yield from companions_of(config.run).items()


def each_engine(config: CheckedConfig) -> Iterator[tuple[GenerationConfig]]:
    """The section `policy.generation`, for rules that check it if there is one."""
    if config.run.policy.generation is not None:
        yield (config.run.policy.generation,)


def each_interpreter(config: CheckedConfig) -> Iterator[tuple[KeyPath, Kind, PolicyConfig | GenerationConfig]]:
    """The sections of models and of the engine that name an interpreter."""
    run = config.run
    for name, model in models_of(run).items():
        if model.python is not None:
            yield model_path(name), Kind.POLICY, model
    engine = run.policy.generation
    if engine is not None and engine.python is not None:
        yield ("policy", "generation"), Kind.GENERATION, engine


def lacks_capability(registry: Registry, kind: Kind, backend: str, capability: str) -> PluginError | None:
    """The error of a backend without a capability; None if it has it, or if that is not known.

    A backend given by its path declares its capabilities on its class, which only the run imports. A backend created in Python
    may be unregistered.
    """
    if is_path(backend) or backend not in registry.names(kind):
        return None
    try:
        registry.find(kind, backend, requires=(capability,))
    except PluginError as error:
        return error
    return None


@rule("algorithm", "loss_fn", applies_to=TRAINING)
def loss_is_for_the_head_of_the_policy(config: CheckedConfig) -> Iterator[Problem]:
    """A loss for value models does not train the log-probabilities of a policy."""
    run = config.run
    if run.loss_fn.head == "scalar" and run.algorithm.head == "tokens":
        yield Problem(
            ("loss_fn", "name"),
            f"{run.loss_fn.name} is a loss for value models, but {run.algorithm_name} trains the log-probabilities of a "
            "policy: remove it.",
        )


@rule("algorithm", "policy.head", applies_to=TRAINING)
def policy_has_the_head_that_is_trained(config: CheckedConfig) -> Iterator[Problem]:
    """The policy has the head that the algorithm trains."""
    name, head, wanted = config.run.algorithm_name, config.run.policy.head, config.run.algorithm.head
    if head != wanted:
        yield Problem(("policy", "head"), f"head is {head!r}, but {name} trains a model with head {wanted!r}: remove the key.")


@rule("algorithm", "policy.frozen", applies_to=TRAINING)
def policy_is_not_frozen(config: CheckedConfig) -> Iterator[Problem]:
    """The policy is trained, so it is not frozen."""
    if config.run.policy.frozen:
        name = config.run.algorithm_name
        yield Problem(("policy", "frozen"), f"{name} trains the policy, so it cannot be frozen: remove the key.")


@rule("algorithm", *COMPANIONS, applies_to=TRAINING, each=each_companion)
def companions_keep_what_their_section_implies(config: CheckedConfig, companion: str, model: PolicyConfig) -> Iterator[Problem]:
    """A value model is trained and has a scalar head; a teacher is frozen and scores tokens; neither samples."""
    path, role = model_path(companion), role_of(companion)
    if role not in config.run.algorithm.runtime_needs.companions:
        return
    for key, value in COMPANIONS[str(path[0])].items():
        if getattr(model, key) != value:
            yield Problem((*path, key), f"must be {show(value)} for a {role}, which is the default: remove the key.")
    if model.generation is not None:
        yield Problem((*path, "generation"), f"a {role} does not sample; only the policy does. Remove the section.")


@rule("policy.max_total_sequence_length", "policy.generation.max_new_tokens", each=each_engine)
def completions_leave_tokens_for_a_prompt(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The longest completion is shorter than a row of the policy."""
    policy = config.run.policy
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        yield Problem(
            ("policy", "generation", "max_new_tokens"),
            f"{generation.max_new_tokens} leaves no tokens for a prompt: policy.max_total_sequence_length, for prompt "
            f"and completion together, is {policy.max_total_sequence_length}. Lower max_new_tokens or increase that length.",
        )


@rule(*(f"{name}.max_total_sequence_length" for name in MODELS), each=each_model)
def companions_fit_the_rows_of_the_policy(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """Every model is long enough for the rows of the policy."""
    length = config.run.policy.max_total_sequence_length
    if model.max_total_sequence_length < length:
        yield Problem(
            (*model_path(name), "max_total_sequence_length"),
            f"{model.max_total_sequence_length} tokens are too few for the policy's rows of up to {length}: raise it to that "
            "(${policy.max_total_sequence_length}).",
        )


@rule("algorithm", *MODELS, each=each_model)
def microbatches_fit_the_longest_rows(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """A microbatch of packed or dynamically batched rows has room for the rows that the loss compares."""
    for batching, key in itertools.product(("dynamic_batching", "sequence_packing"), ("train_mb_tokens", "logprob_mb_tokens")):
        section = getattr(model, batching)
        rows = _rows_that_stay_together(config.run, name) if key == "train_mb_tokens" else 1
        budget, needed = getattr(section, key), rows * model.max_total_sequence_length
        if section.enabled and budget < needed:
            what = "one row" if rows == 1 else f"the {rows} rows that the loss compares, each"
            yield Problem(
                (*model_path(name), batching, key),
                f"{budget} tokens are too few for {what} of {name}.max_total_sequence_length "
                f"({model.max_total_sequence_length}): raise it to {needed}, or lower the length.",
            )


def _rows_that_stay_together(run: RunConfig, model: str) -> int:
    plan = run.algorithm.training_plan(model, run)
    return 1 if plan is None else plan.rows_per_unit


@rule(*(f"{name}.optimizer" for name in MODELS), applies_to=TRAINING, each=each_model)
def optimizer_can_be_created(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The optimizer of a trained model exists, and its arguments have values that it accepts."""
    if model.frozen:
        return
    yield from _optimizer_problems(model.optimizer, (*model_path(name), "optimizer"))
    for group, section in model.optimizer.groups.items():
        own = OptimizerConfig(name=section.name or model.optimizer.name).model_copy(update={"kwargs": section.kwargs})
        at = (*model_path(name), "optimizer", "groups", group)
        yield from _optimizer_problems(own, at)
        if section.name is None and not section.kwargs:
            yield Problem(at, "has no effect: set its `name` or `kwargs`, or remove it.")


@rule(*(f"{name}.scheduler" for name in MODELS), applies_to=TRAINING, each=each_model)
def schedule_can_be_created(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The learning-rate schedule of a trained model exists, and its arguments have values that it accepts."""
    if not model.frozen and model.scheduler is not None:
        yield from _scheduler_problems(model.scheduler, (*model_path(name), "scheduler"))


@rule(
    *(f"{name}.{key}" for name in MODELS for key in ("frozen", "optimizer", "scheduler")), applies_to=TRAINING, each=each_model
)
def frozen_models_have_no_optimizer(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """A model that is never trained has neither an optimizer nor a schedule."""
    # By value: a resolved config states every default.
    for key, default in (("optimizer", OptimizerConfig()), ("scheduler", None)):
        if model.frozen and getattr(model, key) != default:
            yield Problem((*model_path(name), key), "has no effect, since this model is never trained: remove the section.")


def allowed_argument(path: KeyPath) -> str | None:
    """The allowed values of an argument of an optimizer or schedule; None for other keys and for unknown arguments."""
    if len(path) < 3 or path[-2] != "kwargs":
        return None
    section = "optimizer" if path[-4:-2] == ("optimizer", "groups") else str(path[-3])
    check = {"optimizer": _OPTIMIZER_VALUES, "scheduler": _SCHEDULE_VALUES}.get(section, {}).get(str(path[-1]))
    return None if check is None else check[1]


def _optimizer_problems(optimizer: OptimizerConfig, at: KeyPath) -> Iterator[Problem]:
    if (problem := missing_target(optimizer.name)) is not None:
        yield Problem((*at, "name"), f"{optimizer.name} cannot be imported: {problem}")
        return
    name = _class_of(optimizer.name, OPTIM)
    if name in UNUSABLE_OPTIMIZERS:
        unusable = UNUSABLE_OPTIMIZERS[name]
        yield Problem((*at, "name"), f"{optimizer.name} cannot be used to train a language model: {unusable}.")
        return
    if name and (torch_arguments := arguments_of(OPTIM, name)) is not None:
        allowed = (*torch_arguments[0], *torch_arguments[1], DECAY_MATRICES_ONLY)
        yield from _unknown(optimizer.kwargs, allowed, at, of=optimizer.name)
    yield from _bad_values(optimizer.kwargs, at, checks=_OPTIMIZER_VALUES)


def _scheduler_problems(scheduler: SchedulerConfig, at: KeyPath) -> Iterator[Problem]:
    name = scheduler.name
    if name in SCHEDULES:
        yield from _unknown(scheduler.kwargs, arguments(scheduler), at, of=f"the schedule {name}")
        yield from _bad_values(scheduler.kwargs, at, checks=_SCHEDULE_VALUES)
        return
    if "." not in name and ":" not in name:
        meant = did_you_mean(name, [*SCHEDULES, *SCHEDULERS])
        yield Problem(
            (*at, "name"),
            f"unknown schedule {name!r}.{meant} Use {', '.join(sorted(SCHEDULES))}, or a dotted name such as "
            f"{LR_SCHEDULER}.CosineAnnealingLR.",
        )
        return
    if (problem := missing_target(name)) is not None:
        yield Problem((*at, "name"), f"{name} cannot be imported: {problem}")
        return
    short = _class_of(name, LR_SCHEDULER)
    if short in UNUSABLE_SCHEDULERS:
        instead = f"Use {', '.join(sorted(SCHEDULES))}."
        yield Problem((*at, "name"), f"{name} cannot be used as a schedule: {UNUSABLE_SCHEDULERS[short]}. {instead}")
    elif short and (torch_arguments := arguments_of(LR_SCHEDULER, short)) is not None:
        required, optional = torch_arguments
        yield from _unknown(scheduler.kwargs, (*required, *optional), at, of=name)
        for key in required:
            if key not in scheduler.kwargs:
                yield Problem((*at, "kwargs", key), f"is required by {name}.", is_missing=True)


def _class_of(name: str, module: str) -> str:
    """The class of a module that a dotted name refers to; '' for anything else."""
    holder, _, short = name.replace(":", ".").rpartition(".")
    return short if holder == module else ""


def _unknown(kwargs: Mapping[str, Any], allowed: Collection[str], at: KeyPath, *, of: str) -> Iterator[Problem]:
    for key in kwargs:
        if key not in allowed:
            meant = f" Did you mean {MEANINGS[key]!r}?" if MEANINGS.get(key) in allowed else did_you_mean(key, list(allowed))
            yield Problem(
                (*at, "kwargs", key),
                f"{of} has no argument {key!r}.{meant} Its arguments are: {', '.join(allowed)}.",
            )


def _bad_values(kwargs: Mapping[str, Any], at: KeyPath, *, checks: Mapping[str, _Check]) -> Iterator[Problem]:
    for key, (fits, allowed) in checks.items():
        if key in kwargs and not fits(kwargs[key]):
            yield Problem((*at, "kwargs", key), f"must be {allowed}; found {show(kwargs[key])}.")


def _is_not_negative(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _is_step_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


_Check = tuple[Callable[[Any], bool], str]
_NOT_NEGATIVE: _Check = (_is_not_negative, "a number, 0 or more")
_OPTIMIZER_VALUES: dict[str, _Check] = {
    "lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "momentum": _NOT_NEGATIVE,
    # Adafactor has two values, of which one may be null.
    "eps": (lambda value: isinstance(value, list | tuple) or _is_not_negative(value), "a number, 0 or more"),
    "betas": (
        lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_fraction, value)),
        "a list of two numbers, each 0 or more and less than 1",
    ),
    DECAY_MATRICES_ONLY: (lambda value: isinstance(value, bool), "true or false"),
}
_STEPS: _Check = (_is_step_count, "a whole number of optimizer steps, 0 or more")
_SCHEDULE_VALUES: dict[str, _Check] = {
    LENGTH: _STEPS,
    "num_warmup_steps": (lambda value: value is not None and _is_step_count(value), _STEPS[1]),
    "min_lr_ratio": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
}
