"""Predicts the time of a step. On CPUs, backends time a small model; on GPUs, it is computed. This module counts passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import psutil

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.shared_prefix import MAX_SHARE
from rl_core.errors import NotSupportedError
from rl_core.plugins.registry import Registry
from rl_train.algorithms.kl_penalty import kl_in_reward
from rl_train.assembly.losses import loss_of
from rl_train.config.optimizer_steps import OptimizerSteps, optimizer_steps
from rl_train.config.rules.models import models_of
from rl_train.config.schema import RunConfig
from rl_train.plan.gpu_time import assumptions, gpu_planner
from rl_train.plan.gpus import Gpu
from rl_train.plan.planner import memory_planner, planner_of, ranks_of, replicas_of, resolved
from rl_train.plan.rows import longest_prompt, microbatch, rows_of_step

_OVERHEAD: Final = 1.2
"""How many times as long as its fastest passes a step takes; about the mean of benchmarks/results/plan_vs_measured_time.md."""
_BUSY: Final = 0.5
"""Load per CPU above which threads may have to wait for other processes."""
_Find = Callable[[str, PolicyConfig | GenerationConfig], Any]
"""Returns the `ModelTime` or `EngineTime` of a kind of section."""


class ModelTime(Protocol):
    """Measures a policy; created with its section. A backend names its class in the attribute `time_planner` of its policy."""

    @property
    def refit_bytes_per_s(self) -> float:
        """Bytes of weights that it sends per second to an engine with its own copy; a constant that was measured once."""

    def seconds(
        self, *, tokens: int, scored: int, length: int, training: bool, ranks: int, microbatches: float
    ) -> Mapping[str, float]:
        """Seconds of `score` and, if it is trained, `train` for one microbatch, and of `update`, an optimizer step.

        Args:
            tokens: tokens of the microbatch.
            scored: those that are trained.
            length: tokens of its longest row.
            training: whether it is trained.
            ranks: ranks of the model.
            microbatches: mean number of microbatches of an optimizer step on a rank.

        Raises:
            NotSupportedError: it cannot be measured, with the reason.
        """


class EngineTime(Protocol):
    """Measures an engine; created with its section. See `ModelTime`."""

    @property
    def refit_bytes_per_s(self) -> float:
        """Bytes of weights that a replica receives, checks and loads per second; a constant that was measured once."""

    def seconds(self, *, rows: int, prompts: int, prompt: int, completion: int) -> float:
        """Seconds in which a replica samples its rows of a step, all of the same length.

        Args:
            rows: rows of a replica.
            prompts: number of different prompts.
            prompt: tokens of a prompt.
            completion: tokens of a completion.

        Raises:
            NotSupportedError: it cannot be measured, with the reason.
        """


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """The predicted time of a step.

    Attributes:
        phases: Seconds by phase, of those that are predicted.
        prompt: Assumed tokens of each prompt.
        completion: Assumed tokens of each completion.
        not_predicted: Phases without a prediction, each with the reason.
        load: Processes that wanted to compute when it was measured, per CPU of this machine.
        gpu: Name of the GPU that it was computed for; None if it was measured on CPUs.
        assumed: What a computed time assumes and leaves out, one sentence fragment each.
    """

    phases: Mapping[str, float]
    prompt: int
    completion: int
    not_predicted: Mapping[str, str]
    load: float
    gpu: str | None = None
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None if a phase is not predicted."""
        return None if self.not_predicted else sum(self.phases.values())


def plan_time(
    run: RunConfig, registry: Registry, *, gpu: Gpu | None = None, prompt: int | None = None, completion: int | None = None
) -> TimePlan:
    """The time of a step, without environments, validation and checkpoints.

    Args:
        run: The config.
        registry: Used to look up backends and the loss.
        gpu: Computes the time on GPUs like this one; by default, it is measured on the CPUs of this machine.
        prompt: Tokens of each prompt; by default as many as leave room for the completion.
        completion: Tokens of each completion; at most, and by default, `max_new_tokens`.
    """
    generation, limit = run.policy.generation, run.policy.max_total_sequence_length
    longest = 0 if generation is None else min(generation.max_new_tokens, limit - 1)
    run = _with_lengths(resolved(run, on_gpu=gpu is not None), prompt, completion)
    generation = run.policy.generation
    find: _Find = partial(_planner, registry) if gpu is None else partial(gpu_planner, run, registry, gpu, longest)
    phases, reasons = dict[str, float](), dict[str, str]()
    components: dict[str, Callable[[], Mapping[str, float]]] = {}
    if generation is not None and run.algorithm.runtime_needs.rollouts is not None:
        components["rollout"] = partial(_sampling, run, registry, generation, find, on_gpu=gpu is not None)
    for name, model in models_of(run).items():
        components[f"passes of {name}"] = partial(_passes, run, registry, name, model, find, on_gpu=gpu is not None)
    for name, measure in components.items():
        try:
            phases |= _measured(run, measure) if gpu is None else measure()
        except NotSupportedError as error:
            reasons[name] = str(error)
    if run.rollout.max_staleness:
        reasons["step"] = "rollouts and training overlap, because rollout.max_staleness is above 0"
    rollouts = run.algorithm.runtime_needs.rollouts
    if rollouts is not None and rollouts.selects_groups:
        reasons["step"] = "how often a step samples prompts depends on their rewards"
    return TimePlan(
        phases=phases,
        prompt=longest_prompt(run),
        completion=0 if generation is None else generation.max_new_tokens,
        not_predicted=reasons,
        load=_load(),
        gpu=None if gpu is None else gpu.name,
        assumed=() if gpu is None else assumptions(gpu),
    )


def _with_lengths(run: RunConfig, prompt: int | None, completion: int | None) -> RunConfig:
    """The run with limits in which every row has these lengths."""
    generation = run.policy.generation
    if generation is None:
        return run
    new = min(completion or generation.max_new_tokens, generation.max_new_tokens, run.policy.max_total_sequence_length - 1)
    length = min(run.policy.max_total_sequence_length, (prompt or longest_prompt(run)) + new)
    generation = generation.model_copy(update={"max_new_tokens": new})
    changed = {"max_total_sequence_length": length, "generation": generation}
    return run.model_copy(update={"policy": run.policy.model_copy(update=changed)})


def _measured(run: RunConfig, measure: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """Seconds by phase with as many threads as a worker of the run; on a busy machine, at most those with one thread.

    Threads wait for each other in each operation, which takes many times as long if other processes compute on their CPUs.
    """
    with _threads(_worker_threads(run) if run.cluster.backend == "ray" else None) as threads:
        seconds = measure()
    if threads > 1 and _load() > _BUSY:
        with _threads(1):
            alone = measure()
        seconds = {phase: min(value, alone[phase]) for phase, value in seconds.items()}
    return {phase: _OVERHEAD * value for phase, value in seconds.items()}


def _load() -> float:
    load: float = psutil.getloadavg()[0]
    return load / (os.cpu_count() or 1)


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Compute with `count` threads, or as many as before; yields their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _worker_threads(run: RunConfig) -> int:
    return run.cluster.cpus_per_worker or max(1, (os.cpu_count() or 1) // run.cluster.workers_per_node)


def _sampling(run: RunConfig, registry: Registry, section: GenerationConfig, find: _Find, *, on_gpu: bool) -> dict[str, float]:
    """Seconds of sampling and of a refit."""
    rollouts = run.algorithm.runtime_needs.rollouts
    assert rollouts is not None
    planner = find("generation", section)
    policy, memory = (memory_planner(registry, *given) for given in (("policy", run.policy), ("generation", section)))
    replicas = replicas_of(run, section, processes=memory.processes if on_gpu else 1)
    prompts, each = -(-rollouts.prompts_per_draw // replicas), rollouts.samples_per_prompt
    lengths = {"prompt": longest_prompt(run), "completion": section.max_new_tokens}
    found = {"rollout": rollouts.sampled_fraction * planner.seconds(rows=prompts * each, prompts=prompts, **lengths)}
    if memory is not None and (run.cluster.backend == "ray" or policy is None or not policy.is_shared):
        held = memory.by_phase(rows=1, prompt=1, on_gpu=False, limit=None, shares_weights=False)["held"]
        slowest = 0.0 if on_gpu else min(planner.refit_bytes_per_s, find("policy", run.policy).refit_bytes_per_s)
        found["refit"] = planner.refit() if on_gpu else held["weights"] / slowest
    return found


def _passes(
    run: RunConfig, registry: Registry, name: str, model: PolicyConfig, find: _Find, *, on_gpu: bool
) -> dict[str, float]:
    """Seconds of a model's passes and optimizer steps."""
    steps = None if model.frozen else optimizer_steps(run, name)
    if steps is None and not model.frozen:
        raise NotSupportedError(f"{run.algorithm_name} does not declare its number of optimizer steps")
    planner = find("policy", model)
    batch, rollouts = microbatch(run, model, training=not model.frozen), run.algorithm.runtime_needs.rollouts
    length, tokens = min(run.policy.max_total_sequence_length, model.max_total_sequence_length), batch.rows * batch.length
    rows, scored = max(1, tokens // length), tokens
    count = -(-rows_of_step(run) // model.data_ranks(run.cluster)) * length / tokens
    if rollouts is not None:
        prompt = min(longest_prompt(run), length - 1)
        scored = rows * (length - prompt)
        shared = scored + prompt * -(-rows // rollouts.samples_per_prompt)
        memory = memory_planner(registry, "policy", model)
        if memory is not None and memory.shares_prefixes(on_gpu=on_gpu) and shared <= MAX_SHARE * tokens:
            tokens = shared
    together = {"ranks": ranks_of(run), "microbatches": count / (1 if steps is None else steps.per_pass)}
    seconds = planner.seconds(tokens=tokens, scored=scored, length=length, training=steps is not None, **together)
    ranks = 0 if on_gpu else min(ranks_of(run), run.cluster.workers_per_node)
    count *= max(1.0, ranks * _worker_threads(run) / (os.cpu_count() or 1))  # ranks that share cores
    times = dict.fromkeys(_scoring(run, registry, name, steps), count * seconds["score"])
    if steps is not None:
        times |= {"train": count * steps.plan.passes * seconds["train"]}
        times |= {"update": steps.plan.passes * steps.per_pass * seconds["update"]}
    return {phase if name == "policy" else f"{phase} {name}": value for phase, value in times.items()}


def _scoring(run: RunConfig, registry: Registry, name: str, steps: OptimizerSteps | None) -> list[str]:
    """The passes of a model without gradients, which score all rows of a step once."""
    if name != "policy":
        return ["score"]
    loss, penalty = loss_of(run, registry), kl_in_reward(run.loss_fn)
    one = steps is not None and steps.plan.passes * steps.per_pass == 1
    if one and getattr(run.algorithm, "skip_logprobs_when_on_policy", False):
        loss.on_policy = True
    needed = loss.required_keys | (penalty.required_keys if penalty is not None else frozenset())
    keys = {"score": "prev_logprobs", "reference": "reference_policy_logprobs"}
    return [phase for phase, key in keys.items() if key in needed]


def _planner(registry: Registry, kind: str, section: PolicyConfig | GenerationConfig) -> Any:
    planner = planner_of(registry, kind, section, attribute="time_planner")
    if planner is None:
        raise NotSupportedError(f"the backend {section.backend} is not measured")
    return planner
