"""The cluster and the machine: what one process supports, what can be profiled, and how many CPUs there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rl_core.config.diagnostics import Problem
from rl_core.config.source_tree import KeyPath
from rl_train.config.rules.models import MODELS, each_interpreter
from rl_train.config.rules.rule import CONFIG_FILE, CheckedConfig, Stage, Use, rule

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
