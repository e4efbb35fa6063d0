"""Rules about a run as a whole: keys as they were written, schedules, staleness, datasets, profiling, processes and CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rl_core.config.diagnostics import KeyPath, Problem, dotted, show
from rl_core.config.introspection import holds_free_keys, inner_annotation
from rl_core.config.schema import DatasetConfig, RecordKind, SchedulerConfig
from rl_core.plugins.component import Capability, Kind, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_train.config.rules.components import validates
from rl_train.config.rules.models import MODELS, each_interpreter
from rl_train.config.rules.rule import CONFIG_FILE, TRAIN_ONLY, TRAINING, CheckedConfig, Stage, Use, WrittenConfig, rule
from rl_train.config.schedules import LENGTH, TRAINED, arguments, factor, is_number, named_schedules, optimizer_steps
from rl_train.config.schema import RunConfig
from rl_train.config.slots import FUNCTION_KEYS
from rl_train.prompts.prompt_files import prompt_problem


@rule("overrides", stage=Stage.WRITTEN)
def overridden_items_are_in_lists(config: WrittenConfig) -> Iterator[Problem]:
    """An override of one item of a list needs a list that a file or an earlier override sets."""
    for override in config.overrides:
        for length, part in enumerate(override.path):
            path = override.path[:length]
            if _is_index_of_missing_list(config, path, part):
                default = config.layout.default(path)
                hint = f" Its default is {default}." if isinstance(default, list) else ""
                plus = "++" if override.adds else ""
                yield Problem(
                    path,
                    f"no file sets this list, so it has no item {part}: set the whole list, {plus}{dotted(path)}=[...].{hint}",
                    override.location,
                )
                break


def _is_index_of_missing_list(config: WrittenConfig, path: KeyPath, part: str | int) -> bool:
    holder = config.written.at(path)
    # Overrides create a missing container as a mapping; one that a file sets is that file's mistake.
    if holder is None or not isinstance(holder.value, dict) or holder.location.number is None or not str(part).isdecimal():
        return False
    return isinstance(part, int) or _is_list(config, path)


def _is_list(config: WrittenConfig, path: KeyPath) -> bool:
    field = config.layout.find(path)
    if field is None or field.is_free:
        return False
    annotation = field.info.annotation
    return inner_annotation(annotation, (0,)) is not Any and not holds_free_keys(annotation)


@rule("overrides", stage=Stage.WRITTEN)
def overrides_add_keys_with_two_pluses(config: WrittenConfig) -> Iterator[Problem]:
    """`key=value` sets a key that exists in a file or the schema; `++key=value` also adds one to a section with free keys."""
    for override in config.overrides:
        lengths = range(override.known + 1, len(override.path) + 1)
        added = next((override.path[:length] for length in lengths if config.layout.takes_any(override.path[:length])), None)
        if added is not None and not override.adds:
            meant = [key for key in config.layout.ending_in(str(added[-1])) if key[:-1] == added[:-1]]
            yield Problem(
                override.path,
                f"{dotted(added)} exists neither in the file nor in the schema: "
                + (f"did you mean {dotted(meant[0])}? To" if meant else "to")
                + f" add it, write ++{dotted(override.path)}=...",
                override.location,
            )


@rule("env", stage=Stage.WRITTEN)
def reward_functions_are_used(config: WrittenConfig) -> Iterator[Problem]:
    """`reward_fn` and `reward_fns` are not set next to the `name` of an environment that does not have these keys."""
    for path, part in config.layout.sections.items():
        if path[:-1] != ("env",) or part.component is None or part.is_open:
            continue
        section = config.values["env"][path[1]] or {}
        name = section.get("name")
        for key in FUNCTION_KEYS:
            if name is None or key not in section or key in part.model.model_fields:
                continue
            where = (*path, key)
            yield Problem(
                where,
                f"the environment {show(name)} of this task ({dotted((*path, 'name'))}) takes no reward functions: remove "
                f"`name` to score with the functions only, or remove `{key}` to score with {show(name)}.",
                config.written.nearest(where).key_location,
            )


WARMUP = "num_warmup_steps"
_READS = ("algorithm", *(f"{name}.scheduler" for name in TRAINED), "policy.train_global_batch_size", "cluster", "data")


@rule(*_READS, applies_to=TRAINING)
def schedules_last_until_the_end(config: CheckedConfig) -> Iterator[Problem]:
    """A learning-rate schedule is not certain to reach 0 before the run ends."""
    yield from schedule_problems(config.run)


def schedule_problems(run: RunConfig) -> Iterator[Problem]:
    """Schedules that are certain to reach a learning rate of 0 before the run ends."""
    for model, scheduler, steps in named_schedules(run):
        length = scheduler.kwargs.get(LENGTH)
        at = (model, "scheduler", "kwargs", LENGTH)
        if length is None and LENGTH in arguments(scheduler) and steps is None:
            yield Problem(
                at, f"is required. {run.algorithm_name} does not declare its number of optimizer steps.", is_missing=True
            )
        elif steps is not None and is_number(length) and _is_over(scheduler, steps.fewest):
            yield Problem(
                at,
                f"the schedule ends after {length} optimizer steps, but the run makes {steps}: the learning rate would be 0 "
                f"for the last {steps.fewest - int(length)} of them. The length counts optimizer steps, not steps of the "
                "algorithm. Remove it to make the schedule as long as the run.",
            )


@rule(*_READS, applies_to=TRAIN_ONLY, warns=True)
def schedules_fit_the_run(config: CheckedConfig) -> Iterator[Problem]:
    """A learning-rate schedule does not end before the run, and its warm-up does. With data, a later rule knows more."""
    yield from schedule_warnings(config.run)


@rule(
    "algorithm", *(f"{name}.train_global_batch_size" for name in TRAINED), "cluster", "data", applies_to=TRAIN_ONLY, warns=True
)
def optimizer_steps_have_equal_rows(config: CheckedConfig) -> Iterator[Problem]:
    """The optimizer steps of a step have the same number of rows."""
    for model in TRAINED:
        steps = optimizer_steps(config.run, model)
        if steps is not None and steps.per_pass > 1 and steps.plan.is_exact and (rest := steps.plan.rows % steps.rows):
            yield Problem(
                (model, "train_global_batch_size"),
                f"the {steps.plan.rows} rows of a step are not a multiple of {steps.rows}: the last of {steps.per_pass} "
                f"optimizer steps has {rest} rows, which count as much as the {steps.rows} rows of the others. Choose a "
                f"divisor of {steps.plan.rows}.",
            )


def schedule_warnings(run: RunConfig) -> Iterator[Problem]:
    """Schedules that may end before the run, and warm-ups that do not."""
    for model, scheduler, steps in named_schedules(run):
        if steps is None:
            continue
        length, warmup = scheduler.kwargs.get(LENGTH), scheduler.kwargs.get(WARMUP)
        at = (model, "scheduler", "kwargs")
        if is_number(length) and _is_over(scheduler, steps.most) and not steps.is_exact:
            yield Problem(
                (*at, LENGTH),
                f"the run may make more optimizer steps: up to {steps}. The learning rate of the additional steps is 0.",
            )
        if is_number(warmup) and warmup >= steps.most:
            highest = factor(scheduler, steps.most - 1, length=steps.most)
            yield Problem(
                (*at, WARMUP),
                f"the warm-up of {warmup} optimizer steps does not end before the run, which makes {steps}: the learning rate "
                f"only reaches {highest:.0%} of `optimizer.kwargs.lr`.",
            )


def _is_over(scheduler: SchedulerConfig, steps: int) -> bool:
    """Whether the learning rate is 0 in the last of this many optimizer steps."""
    return factor(scheduler, steps - 1) == 0.0


ENGINE_SHARES_GPUS = (
    "policy and engine share their GPUs, so the engine sleeps while a model is trained and cannot sample ahead. Set "
    "policy.generation.resources, or set rollout.max_staleness to 0."
)
_AT = ("rollout", "max_staleness")


@rule("algorithm", "rollout.max_staleness", "rollout.order", applies_to=TRAINING)
def algorithm_accepts_older_rollouts(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, the algorithm samples and is correct for rollouts of older weights."""
    run = config.run
    if run.rollout.max_staleness == 0:
        return
    needs = run.algorithm.runtime_needs.rollouts
    if needs is None:
        yield Problem(
            _AT, f"{run.algorithm_name} does not sample during training, so there is nothing to sample ahead. Remove it."
        )
        return
    if not needs.accepts_stale:
        yield Problem(
            _AT,
            f"{run.algorithm_name} does not support rollouts that older weights sampled, with these settings "
            "(`RolloutNeeds.accepts_stale`). Set max_staleness to 0.",
        )
    if needs.selects_groups and run.rollout.order == "exact":
        yield Problem(
            ("rollout", "order"),
            "dynamic sampling replaces groups when they end, with the weights of that time, so batches cannot be sampled with "
            "the weights of one step. Use order: ready, or disable dynamic sampling.",
        )


@rule("rollout.max_staleness", "loss_fn", applies_to=TRAINING)
def loss_corrects_for_older_weights(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, the loss corrects for samples of older weights."""
    run = config.run
    if run.rollout.max_staleness > 0 and not run.loss_fn.corrects_for_older_weights:
        yield Problem(
            _AT,
            "the loss treats every sample as one of the current weights, so older samples would bias the gradient. Set "
            "loss_fn.ratio_to: sampler or loss_fn.use_importance_sampling_correction: true, for distillation loss_fn.topk, or "
            "set max_staleness to 0.",
        )


@rule("rollout.max_staleness", "cluster.backend", "cluster.use_gpus", "policy.generation", applies_to=TRAINING)
def engine_is_separate_from_the_policy(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, policy and engine run in separate processes and do not share GPUs."""
    run = config.run
    if run.rollout.max_staleness > 0 and run.cluster.backend == "in_process":
        yield Problem(
            _AT,
            "with cluster.backend: in_process, policy and engine compute in one thread and may share weights, so rollouts "
            "cannot continue during training. Set cluster.backend: ray, or set max_staleness to 0.",
        )
    elif run.rollout.max_staleness > 0 and run.cluster.use_gpus and not run.engine_has_own_resources:
        yield Problem(_AT, ENGINE_SHARES_GPUS)


@rule("rollout.max_staleness", "policy.generation", applies_to=TRAINING)
def engine_samples_single_rows(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, rows of the engine join and leave while others run."""
    run, generation = config.run, config.run.policy.generation
    if run.rollout.max_staleness == 0 or generation is None or is_path(generation.backend):
        return
    if Capability.ASYNC_ROWS not in config.registry.find(Kind.GENERATION, generation.backend).capabilities:
        yield Problem(
            ("policy", "generation", "backend"),
            f"the engine {generation.backend!r} does not have the capability {str(Capability.ASYNC_ROWS)!r}, so its rows "
            "cannot begin and end during training. Set rollout.max_staleness to 0, or choose another engine.",
        )


_KINDS: Final[Mapping[RecordKind, tuple[str, str]]] = {
    "conversations": ("prompts or conversations", "`jsonl` reads JSON lines"),
    "pairs": ("pairs of a chosen and a rejected answer", "`preference` reads pairs from JSON lines"),
    "unpaired": ("answers with a label", "`preference` with `label_key` reads them from JSON lines"),
}
"""What a record is, and the dataset that reads such records."""


def each_dataset(config: CheckedConfig) -> Iterator[tuple[str, KeyPath, DatasetConfig]]:
    """The datasets of a config: the key within `data`, the whole key and the section."""
    for key, section in config.run.data.sections().items():
        yield key, ("data", *key.split(".", 1)), section


def _is_used(config: CheckedConfig, key: str) -> bool:
    return not key.startswith("validation") or config.use is not Use.TRAIN or validates(config.run)


@rule("data", each=each_dataset, applies_to=CONFIG_FILE)
def processor_can_be_imported(config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig) -> Iterator[Problem]:
    """The processor of a dataset exists."""
    if section.processor is not None and (problem := missing_target(section.processor)) is not None:
        yield Problem((*path, "processor"), f"{section.processor} cannot be imported: {problem}")


@rule("callbacks", applies_to=TRAIN_ONLY)
def callbacks_can_be_imported(config: CheckedConfig) -> Iterator[Problem]:
    """The function or class of each callback exists."""
    for name, section in config.run.callbacks.items():
        at = ("callbacks", name, "name")
        if not is_path(section.name):
            yield Problem(at, f"must be a dotted path such as my_module.MyCallback; found {show(section.name)}.")
        elif (problem := missing_target(section.name)) is not None:
            yield Problem(at, f"{section.name} cannot be imported: {problem}")


@rule("algorithm", "data", each=each_dataset, applies_to=frozenset({Use.TRAIN}))
def records_are_of_the_kind_that_is_read(
    config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig
) -> Iterator[Problem]:
    """Datasets have the records that the algorithm reads: conversations, pairs of answers, or answers with a label."""
    run, kind = config.run, section.kind_of_records
    wanted = run.algorithm.record_kind
    if kind is None or kind == wanted or not _is_used(config, key):
        return
    remedy = f"Use another dataset: {_KINDS[wanted][1]}."
    if (kind, wanted) == ("pairs", "unpaired"):
        remedy = "Set `label_key` if rows have one answer and a label; `split_pairs: true` makes two such answers of each pair."
    elif (kind, wanted) == ("unpaired", "pairs"):
        remedy = "Remove `label_key` and `split_pairs` if rows are pairs, or train with kto."
    yield Problem(
        (*path, "dataset_name"),
        f"{section.dataset_name} has {_KINDS[kind][0]}, but {run.algorithm_name} needs {_KINDS[wanted][0]}. {remedy}",
    )


def tasks_of(run: RunConfig) -> tuple[str, list[str]]:
    """The section that names the tasks of a run, `env` or `teachers`, and their names; no names if rows need no task."""
    return ("env", list(run.env)) if run.env else ("teachers", list(run.teachers))


@rule("algorithm", "data", "env", "teachers", each=each_dataset, applies_to=CONFIG_FILE)
def task_of_a_dataset_is_a_task_of_the_run(
    config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig
) -> Iterator[Problem]:
    """The task of a dataset whose rows are scored is a task of `env`, or has a teacher if nothing else scores."""
    name, tasks = tasks_of(config.run)
    is_scored = key.startswith("validation") or config.run.algorithm.runtime_needs.rollouts is not None
    task = section.task_name
    if tasks and is_scored and task is not None and task not in tasks and _is_used(config, key):
        meant = did_you_mean(task, tasks)
        yield Problem((*path, "task_name"), f"`{name}` has no task {task!r}.{meant} Tasks in `{name}`: {', '.join(tasks)}.")


@rule("data.prompt", applies_to=CONFIG_FILE)
def prompt_config_exists(config: CheckedConfig) -> Iterator[Problem]:
    """The prompt config and the few-shot examples of `data.prompt` exist and fit together."""
    data = config.run.data
    if data.prompt is None:
        return
    name, examples = data.prompt.prompt_config, data.prompt.examples_type
    if name is not None:
        if (problem := prompt_problem(name)) is not None:
            yield Problem(("data", "prompt", "prompt_config"), problem)
        elif problem := prompt_problem(name, examples):
            yield Problem(("data", "prompt", "examples_type"), problem)
    elif examples and not any(getattr(section, "prompt", None) for section in data.sections().values()):
        yield Problem(("data", "prompt", "examples_type"), "has no effect without a prompt config: set `prompt_config`.")


_IN_PROCESS = "cluster.backend is in_process, which runs one worker of each kind in this process"


@rule("profiling.steps", "algorithm.max_num_steps", applies_to=frozenset({Use.TRAIN}))
def profiled_steps_are_within_the_run(config: CheckedConfig) -> Iterator[Problem]:
    """Steps to profile are not beyond the end of the run."""
    last = config.run.algorithm.max_num_steps
    if late := [step for step in config.run.profiling.steps if step > last]:
        yield Problem(("profiling", "steps"), f"contains {late[0]}, but the run ends after step {last}. Remove it.")


@rule("profiling.steps", "cluster.backend", applies_to=frozenset({Use.TRAIN}))
def profiled_models_are_in_this_process(config: CheckedConfig) -> Iterator[Problem]:
    """Profiling needs models in this process, because a trace does not show others."""
    backend = config.run.cluster.backend
    if config.run.profiling.steps and backend != "in_process":
        yield Problem(
            ("profiling", "steps"),
            "requires cluster.backend: in_process, because the trace only shows this process, and with "
            f"{backend} the models are in others. Set cluster.backend: in_process, or remove it.",
        )


@rule("profiling", "cluster.use_gpus", stage=Stage.MACHINE, applies_to=frozenset({Use.TRAIN}))
def recorded_memory_is_that_of_a_gpu(config: CheckedConfig) -> Iterator[Problem]:
    """`profiling.memory` needs a GPU and steps to profile."""
    if not config.run.profiling.memory:
        return
    if not config.run.profiling.steps:
        yield Problem(("profiling", "memory"), "has no effect without profiling.steps. Set the steps to record, or remove it.")
    if config.run.cluster.use_gpus is False or not _has_gpu():
        yield Problem(
            ("profiling", "memory"),
            "records allocations on a GPU, and this run uses none. Remove it: memory/<phase>_gib in the metrics is the memory "
            "of a process on any device.",
        )


def _each_worker_group(config: CheckedConfig) -> Iterator[tuple[KeyPath, int | None]]:
    """The keys with a number of workers."""
    run = config.run
    yield ("cluster", "num_nodes"), run.cluster.num_nodes
    yield ("cluster", "workers_per_node"), run.cluster.workers_per_node
    for task, section in run.env.items():
        yield ("env", task, "num_workers"), section.num_workers
    if run.policy.generation is not None:
        yield ("policy", "generation", "num_workers"), run.policy.generation.num_workers


@rule("cluster", "env", "policy.generation.num_workers", applies_to=CONFIG_FILE)
def one_process_has_one_worker_of_each_kind(config: CheckedConfig) -> Iterator[Problem]:
    """`cluster.backend: in_process` has one worker of each kind."""
    if config.run.cluster.backend == "in_process":
        for path, count in _each_worker_group(config):
            if count is not None and count > 1:
                yield Problem(path, f"{count} is not supported: {_IN_PROCESS}. Set it to 1, or set cluster.backend: ray.")


@rule("cluster.backend", *(f"{name}.python" for name in MODELS), "policy.generation.python", applies_to=CONFIG_FILE)
def one_process_has_one_interpreter(config: CheckedConfig) -> Iterator[Problem]:
    """`cluster.backend: in_process` runs every model with the interpreter of the command."""
    if config.run.cluster.backend == "in_process":
        for path, _, _ in each_interpreter(config):
            yield Problem((*path, "python"), f"is not supported: {_IN_PROCESS}. Remove it, or set cluster.backend: ray.")


@rule("cluster", applies_to=CONFIG_FILE)
def one_process_has_the_threads_of_torch(config: CheckedConfig) -> Iterator[Problem]:
    """`cluster.backend: in_process` uses torch's own number of threads."""
    cluster = config.run.cluster
    if cluster.backend == "in_process" and cluster.cpus_per_worker is not None:
        yield Problem(
            ("cluster", "cpus_per_worker"),
            f"{cluster.cpus_per_worker} is not supported: {_IN_PROCESS} with torch's own number of threads (OMP_NUM_THREADS). "
            "Remove it, or set cluster.backend: ray.",
        )


@rule("cluster", "policy.generation", stage=Stage.MACHINE, applies_to=frozenset({Use.TRAIN}))
def machine_has_the_cpus(config: CheckedConfig) -> Iterator[Problem]:
    """This machine has the CPUs that the workers need, if the run only uses this machine.

    A running Ray cluster (RAY_ADDRESS), several nodes and GPUs are not checked: their resources are only known when the run
    starts.
    """
    cluster = config.run.cluster
    is_here = cluster.backend == "ray" and cluster.num_nodes == 1 and not os.environ.get("RAY_ADDRESS")
    if not is_here or cluster.use_gpus or (cluster.use_gpus is None and _has_gpu()):
        return
    cpus, cpus_each = os.cpu_count() or 1, cluster.cpus_per_worker or 1
    generation = config.run.policy.generation
    engine = generation.resources if generation is not None else None
    if engine is not None:
        cpus -= engine.num_nodes * engine.workers_per_node * (engine.cpus_per_worker or 1)
    if cluster.workers_per_node * cpus_each > cpus:
        has = "1 CPU" if cpus == 1 else f"{cpus} CPUs"
        has += " next to those of policy.generation.resources" if engine is not None else ""
        fitting = max(1, cpus // cpus_each)
        yield Problem(
            ("cluster", "workers_per_node"),
            f"{cluster.workers_per_node} workers with {cpus_each} CPU(s) each need {cluster.workers_per_node * cpus_each} "
            f"CPUs, but this machine has {has}. Lower it to {fitting}, or set RAY_ADDRESS to the cluster that the run should "
            "use.",
        )


def _has_gpu() -> bool:
    # Reads the driver's files, because checking with torch or Ray would import them.
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()
