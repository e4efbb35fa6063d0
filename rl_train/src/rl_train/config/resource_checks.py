"""Checks `cluster`: settings that one process does not support, and more workers than this machine has CPUs for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rl_core.config.source_tree import KeyPath
from rl_train.config.component_checks import models_of
from rl_train.config.schema import RunConfig

_IN_PROCESS = "cluster.backend is in_process, which runs one worker of each kind in this process"


def profiling_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Steps to profile that are beyond the end of the run, and models in other processes, which a trace would not show."""
    steps, last = run.profiling.steps, run.algorithm.max_num_steps
    if late := [step for step in steps if step > last]:
        yield ("profiling", "steps"), f"contains {late[0]}, but the run ends after step {last}. Remove it."
    if steps and run.cluster.backend != "in_process":
        yield (
            ("profiling", "steps"),
            "requires cluster.backend: in_process, because the trace only shows this process, and with "
            f"{run.cluster.backend} the models are in others. Set cluster.backend: in_process, or remove it.",
        )


def in_process_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Numbers of workers, threads and interpreters that `cluster.backend: in_process` does not support."""
    cluster = run.cluster
    if cluster.backend != "in_process":
        return
    counts: list[tuple[KeyPath, int | None]] = [
        (("cluster", "num_nodes"), cluster.num_nodes),
        (("cluster", "workers_per_node"), cluster.workers_per_node),
        *((("env", task, "num_workers"), section.num_workers) for task, section in run.env.items()),
    ]
    interpreters: list[tuple[KeyPath, str | None]] = [
        ((name, "python"), model.python) for name, model in models_of(run).items()
    ]
    generation = run.policy.generation
    if generation is not None:
        counts.append((("policy", "generation", "num_workers"), generation.num_workers))
        interpreters.append((("policy", "generation", "python"), generation.python))
    for path, count in counts:
        if count is not None and count > 1:
            yield path, f"{count} is not supported: {_IN_PROCESS}. Set it to 1, or set cluster.backend: ray."
    for path, python in interpreters:
        if python is not None:
            yield path, f"is not supported: {_IN_PROCESS}. Remove it, or set cluster.backend: ray."
    if cluster.cpus_per_worker is not None:
        yield (
            ("cluster", "cpus_per_worker"),
            f"{cluster.cpus_per_worker} is not supported: {_IN_PROCESS} with torch's own number of threads (OMP_NUM_THREADS). "
            "Remove it, or set cluster.backend: ray.",
        )


def machine_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Report more workers than this machine has CPUs for, if the run only uses this machine.

    A running Ray cluster (RAY_ADDRESS), several nodes and GPUs are not checked: their resources are only known when
    the run starts.
    """
    cluster = run.cluster
    is_here = cluster.backend == "ray" and cluster.num_nodes == 1 and not os.environ.get("RAY_ADDRESS")
    if not is_here or cluster.use_gpus or (cluster.use_gpus is None and _has_gpu()):
        return
    cpus, each = os.cpu_count() or 1, cluster.cpus_per_worker or 1
    if cluster.workers_per_node * each > cpus:
        has = "1 CPU" if cpus == 1 else f"{cpus} CPUs"
        fitting = max(1, cpus // each)
        yield (
            ("cluster", "workers_per_node"),
            f"{cluster.workers_per_node} workers with {each} CPU(s) each need {cluster.workers_per_node * each} CPUs, but "
            f"this machine has {has}. Lower it to {fitting}, or set RAY_ADDRESS to the cluster that the run should use.",
        )


def _has_gpu() -> bool:
    # Reads the driver's files, because checking with torch or Ray would import them.
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()
