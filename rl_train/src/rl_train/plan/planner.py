"""Predicts the memory of a run by process, phase and part. Backends describe their own processes; this module combines them.

On GPUs, models and engine use the memory one after the other, as `rl_train.weight_sync.device_memory` arranges it; on CPUs,
nothing moves. Every row has the maximum length, because the data are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Protocol

from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import Devices
from rl_core.data.generation_io import MOST_SET_IDS
from rl_core.data.shared_prefix import MAX_SHARE
from rl_core.plugins.import_path import resolve
from rl_core.plugins.registry import Registry
from rl_core.weights.source import MOST_BYTES_ON_CPU
from rl_train.assembly.parts import loss_of
from rl_train.assembly.placement import resolve_adapters
from rl_train.config.rules.models import models_of
from rl_train.config.schema import RunConfig
from rl_train.diagnostics.model_files import read_model_config
from rl_train.files import format_size
from rl_train.rollouts.trajectory import MOST_SET_BYTES

_DRIVER_LIBRARIES: Final = 470 * 2**20
"""Proportional set size of a driver that has connected to Ray and loaded tokenizer and data; config `ray` of
benchmarks/plan_vs_measured.py."""
_LONE_LIBRARIES: Final = 460 * 2**20
"""The same of a process that has driver, models, engine and environments, with data, tokenizer and compiled kernels."""
_ENVIRONMENT_LIBRARIES: Final = 220 * 2**20
"""The same of a process that has imported rlcore and no backend."""
Parts = Mapping[str, int]
"""Bytes by part, such as `weights` or `activations`."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """The predicted memory of a process, or of one GPU.

    Attributes:
        name: What runs in it: `policy`, `engine`, `driver`, or several of them joined by ` + `.
        count: Number of equal ones on one machine.
        phases: The parts that are in memory in each phase of a step; not empty.
    """

    name: str
    count: int
    phases: Mapping[str, Parts]

    def bytes_in(self, phase: str) -> int:
        """Bytes of one process in a phase; in a phase that does not concern it, those of its phase with the fewest."""
        if phase in self.phases:
            return sum(self.phases[phase].values())
        return min(sum(parts.values()) for parts in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes."""
        return max(self.phases, key=self.bytes_in)

    @property
    def peak(self) -> int:
        """Bytes of one process in its peak phase."""
        return self.bytes_in(self.peak_phase)

    @property
    def largest_part(self) -> str:
        """The part with the most bytes in the peak phase."""
        parts = self.phases[self.peak_phase]
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The predicted memory of a run.

    Attributes:
        processes: On GPUs, one entry describes each GPU.
        on_gpu: Whether `limit` is the memory of one GPU; otherwise, of the machine.
        limit: Bytes that are available; None if unknown.
        undescribed: Models, and the engine, whose backends do not describe their memory, one sentence fragment each.
        not_counted: What else the plan leaves out or assumes, in the same form.
    """

    processes: tuple[ProcessPlan, ...]
    on_gpu: bool
    limit: int | None
    undescribed: tuple[str, ...]
    not_counted: tuple[str, ...]

    def bytes_in(self, phase: str) -> int:
        """Bytes of all processes of the machine in a phase; on GPUs, those of one GPU."""
        return sum(process.bytes_in(phase) * (1 if self.on_gpu else process.count) for process in self.processes)

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes in all processes."""
        return max((phase for process in self.processes for phase in process.phases), key=self.bytes_in)

    @property
    def peak(self) -> int:
        """Bytes in the peak phase."""
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None if there is no limit, or if only a part of the run is described."""
        if self.limit is None or (self.undescribed and self.peak <= self.limit):
            return None
        return self.peak <= self.limit

    @property
    def largest_process(self) -> ProcessPlan:
        """The process that needs the most in the peak phase."""
        return max(self.processes, key=lambda process: process.bytes_in(self.peak_phase) * process.count)


def plan_memory(run: RunConfig, registry: Registry, *, on_gpu: bool, limit: int | None) -> MemoryPlan:
    """The plan of a run.

    Args:
        run: The config.
        registry: Used to look up the loss.
        on_gpu: Whether models and engine run on GPUs.
        limit: Bytes that one GPU, or the machine, has for the run; None if unknown.

    Raises:
        UserError: The model of a section does not exist or cannot be built.
    """
    run = resolve_adapters(resolved(run, on_gpu=on_gpu), registry)
    undescribed: list[str] = []
    not_counted: list[str] = []
    components = list(_models(run, registry, undescribed, not_counted, on_gpu=on_gpu))
    policy = memory_planner(registry, "policy", run.policy)
    shares = run.cluster.backend == "in_process" and not on_gpu and policy is not None and policy.is_shared
    gpu = limit if on_gpu else None
    components += _engine(run, registry, undescribed, not_counted, gpu=gpu, on_gpu=on_gpu, shares_weights=shares)
    processes = _on_gpu(run, components) if on_gpu else _on_cpu(run, components)
    not_counted += _assumptions(run, on_gpu=on_gpu)
    return MemoryPlan(
        processes=tuple(processes),
        on_gpu=on_gpu,
        limit=limit,
        undescribed=tuple(undescribed),
        not_counted=tuple(not_counted),
    )


def resolved(run: RunConfig, *, on_gpu: bool) -> RunConfig:
    """The run with the defaults of its devices. That a GPU supports bfloat16 is assumed."""
    devices = Devices(use_gpus=on_gpu, have_bfloat16=on_gpu, trains=True)
    models: dict[str, PolicyConfig] = {name: model.for_devices(devices) for name, model in models_of(run).items()}
    policy = models["policy"]
    if policy.generation is not None:
        engine = policy.generation.for_devices(devices).for_policy(policy)
        models["policy"] = policy.model_copy(update={"generation": engine})
    return run.model_copy(update=models)


@dataclass(frozen=True, kw_only=True)
class _Component:
    """A model or the engine: the parts of one of its processes by phase, and the number of these on a machine."""

    name: str
    held: Parts
    phases: Mapping[str, Parts]
    count: int
    libraries: int

    @property
    def with_held(self) -> dict[str, Parts]:
        """All parts that are in memory in each phase."""
        return {phase: _sum(self.held, parts) for phase, parts in self.phases.items()}


def _models(
    run: RunConfig, registry: Registry, undescribed: list[str], not_counted: list[str], *, on_gpu: bool
) -> Iterator[_Component]:
    loss = loss_of(run, registry)
    nodes = max(1, run.cluster.num_nodes)
    for name, model in models_of(run).items():
        planner = memory_planner(registry, "policy", model)
        if planner is None:
            undescribed.append(f"all of `{name}`: its backend {model.backend} does not describe its memory")
            continue
        train, needs = None if model.frozen else microbatch(run, model, training=True), run.algorithm.runtime_needs
        is_scored = model.frozen or needs.samples or needs.extra_scored_rows
        score = microbatch(run, model, training=False) if is_scored else None
        if planner.shares_prefixes(on_gpu=on_gpu):
            train = with_shared_prefixes(run, train) if train is not None and not loss.allows_dropout else train
            score = None if score is None else with_shared_prefixes(run, score)
        phases = dict(
            planner.by_phase(
                ranks=ranks_of(run),
                train=None if train is None else train.shape,
                several=train is not None and train.several,
                score=None if score is None else score.shape,
                reference=name == "policy" and "reference_policy_logprobs" in loss.required_keys,
                on_gpu=on_gpu,
            )
        )
        held = phases.pop("held")
        not_counted += [f"{name}: {left_out}" for left_out in planner.not_counted()]
        named = {phase if name == "policy" else f"{phase} {name}": parts for phase, parts in phases.items()}
        count = -(-ranks_of(run) // nodes)
        yield _Component(name=name, held=held, phases=named, count=count, libraries=planner.libraries)


def _engine(
    run: RunConfig,
    registry: Registry,
    undescribed: list[str],
    not_counted: list[str],
    *,
    on_gpu: bool,
    gpu: int | None,
    shares_weights: bool,
) -> Iterator[_Component]:
    section = run.policy.generation
    if section is None or not run.algorithm.runtime_needs.samples:
        return
    planner = memory_planner(registry, "generation", section)
    if planner is None:
        undescribed.append(f"all of the engine: its backend {section.backend} does not describe its memory")
        return
    replicas = replicas_of(run, section, processes=planner.processes if on_gpu else 1)
    rows, prompt = -(-rows_of_step(run) // replicas), longest_prompt(run)
    phases = dict(planner.by_phase(rows=rows, prompt=prompt, on_gpu=on_gpu, limit=gpu, shares_weights=shares_weights))
    held = phases.pop("held")
    if not shares_weights:
        buffer = section.refit_buffer_mib * 2**20
        buffers = min(buffer if on_gpu else 2 * min(buffer, MOST_BYTES_ON_CPU), sum(held.values()))
        phases["refit"] = {**phases.get("refit", {}), "transfer buffers": buffers}
    not_counted += [f"engine: {left_out}" for left_out in planner.not_counted()]
    count = -(-replicas * planner.processes // max(1, run.cluster.num_nodes))
    yield _Component(name="engine", held=held, phases=phases, count=count, libraries=planner.libraries)


def _on_cpu(run: RunConfig, components: list[_Component]) -> Iterator[ProcessPlan]:
    if run.cluster.backend == "in_process":
        libraries = {"libraries": max([_LONE_LIBRARIES, *(each.libraries for each in components)]), **_sets(run)}
        held = _sum(libraries, *(_named(each, each.held, components) for each in components))
        phases = {phase: _sum(held, parts) for each in components for phase, parts in each.phases.items()} or {"all": held}
        yield ProcessPlan(name=" + ".join(["driver", *(each.name for each in components)]), count=1, phases=phases)
        return
    yield ProcessPlan(name="driver", count=1, phases={"all": {"libraries": _DRIVER_LIBRARIES, **_sets(run)}})
    for each in components:
        phases = {phase: {"libraries": each.libraries, **parts} for phase, parts in each.with_held.items()}
        yield ProcessPlan(name=each.name, count=each.count, phases=phases)
    workers = sum(section.num_workers for section in run.env.values())
    if workers:
        yield ProcessPlan(name="environments", count=workers, phases={"all": {"libraries": _ENVIRONMENT_LIBRARIES}})


def _sets(run: RunConfig) -> dict[str, int]:
    """The part for the sampled sets of a step, as large as they can be, if it has any."""
    model = read_model_config(run.policy.model_name) if run.needs_sampled_sets else None
    if (section := run.policy.generation) is None or model is None:
        return {}
    vocabulary: int = model.get_text_config(decoder=True).vocab_size
    largest = min(section.top_k or vocabulary, vocabulary)
    words = largest if largest <= MOST_SET_IDS else max(MOST_SET_IDS, -(-vocabulary // 32) + 1)
    length = run.policy.max_total_sequence_length
    sampled = min(section.max_new_tokens * max(run.max_turns.values(), default=1), length)
    return {"kept tokens": min(4 * rows_of_step(run) * (words * sampled + length), MOST_SET_BYTES)}


def _named(component: _Component, parts: Parts, components: list[_Component]) -> Parts:
    """Parts with the name of their component, if several components have parts of the same name."""
    return parts if component is components[0] else {f"{component.name} {part}": size for part, size in parts.items()}


def _on_gpu(run: RunConfig, components: list[_Component]) -> Iterator[ProcessPlan]:
    """One entry for each GPU of models and engine, or two if the engine has its own."""
    engine = next((each for each in components if each.name == "engine"), None)
    models = [each for each in components if each is not engine]
    phases = {phase: parts for each in models for phase, parts in each.with_held.items()}
    section = run.policy.generation
    if engine is not None and section is not None:
        sampling, policy = engine.with_held, next((each.held for each in models if each.name == "policy"), {})
        if section.resources is not None:
            yield ProcessPlan(name="GPU of the engine", count=engine.count, phases=sampling)
        elif section.sleeps:
            sent = {"policy weights": policy.get("weights", 0)}
            phases |= sampling | {"refit": _sum(sampling.get("refit", {}), sent)}
        else:
            sampling = {phase: _named(engine, parts, components) for phase, parts in sampling.items()}
            awake = max(sampling.values(), key=lambda parts: sum(parts.values()))
            phases = {phase: _sum(parts, awake) for phase, parts in phases.items()}
            phases |= {phase: _sum(policy, {**awake, **parts}) for phase, parts in sampling.items()}
    if phases or not components:
        count = max([1, *(each.count for each in components)])
        yield ProcessPlan(name="GPU", count=count, phases=phases or {"all": {}})


def _sum(*parts: Parts) -> dict[str, int]:
    return {part: sum(each.get(part, 0) for each in parts) for part in dict.fromkeys(chain(*parts))}


def _assumptions(run: RunConfig, *, on_gpu: bool) -> Iterator[str]:
    yield f"lengths of the data: every row is counted with {run.policy.max_total_sequence_length} tokens, the maximum"
    if run.rollout.max_staleness:
        yield "rollouts in progress during training: phases are counted one after the other"
    if on_gpu:
        yield "CUDA contexts, NCCL buffers and fragmentation, often 1 to 3 GiB per GPU"
        yield "host memory, to which models move while they wait"
        for size in _sets(run).values():
            yield f"host memory of the tokens that top_p, top_k and min_p keep in a step, at most {format_size(size)}"
        return
    yield "freed tensors that the C library keeps: little with glibc, up to as much again with others"
    if run.cluster.backend == "ray":
        yield "Ray's own processes and its object store"


def memory_planner(registry: Registry, kind: str, section: PolicyConfig | GenerationConfig) -> Any:
    """The `ModelMemory` (kind `policy`) or `EngineMemory` (`generation`) of a section; None if its backend has none."""
    target = getattr(registry.find(kind, section.backend).load(), "memory_planner", None)
    return None if target is None else resolve(target, key=f"{section.backend}.memory_planner")(section)


class ModelMemory(Protocol):
    """Describes the memory of one rank of a policy; created with the section of the policy.

    A backend names its class in the attribute `memory_planner` of its policy class, as `module:name`.
    """

    def by_phase(
        self,
        *,
        ranks: int,
        train: tuple[int, int] | None,
        several: bool,
        score: tuple[int, int] | None,
        reference: bool,
        on_gpu: bool,
    ) -> Mapping[str, Parts]:
        """Bytes of one rank by phase (`held`, which is in memory in all phases, `score`, `train`, `update`) and part.

        Args:
            ranks: Number of ranks.
            train: Rows of a training microbatch and their length in tokens; None if the model is not trained.
            several: Whether an optimizer step has several microbatches.
            score: The same of a scoring microbatch; None if the model does not score.
            reference: Whether the loss needs a reference policy.
            on_gpu: Whether it runs on GPUs.
        """

    def not_counted(self) -> list[str]:
        """What `by_phase` leaves out."""

    def saving_overrides(self) -> list[str]:
        """Overrides that save memory."""

    def shares_prefixes(self, *, on_gpu: bool) -> bool:
        """Whether rows of the same prompt compute its common prefix once."""

    def matrix_sizes(self) -> Mapping[str, float]:
        """Numbers of weights that a token is multiplied with, by kind; see `rl_train.metrics.measured`."""

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""

    @property
    def is_shared(self) -> bool:
        """Whether an engine in the same process can compute with its tensors."""

    @property
    def libraries(self) -> int:
        """Bytes of a process on CPUs after its imports (proportional set size)."""


class EngineMemory(Protocol):
    """Describes the memory of one process of an engine; created with the section of the engine. See `ModelMemory`."""

    @property
    def processes(self) -> int:
        """Number of processes of a replica, each with its own GPU."""

    @property
    def libraries(self) -> int:
        """Bytes of a process on CPUs after its imports (proportional set size)."""

    def by_phase(self, *, rows: int, prompt: int, on_gpu: bool, limit: int | None, shares_weights: bool) -> Mapping[str, Parts]:
        """Bytes of one process by phase (`held`, `rollout`, `refit`) and part.

        Args:
            rows: Rows that a replica samples in a step.
            prompt: Tokens of the longest prompt.
            on_gpu: Whether it runs on GPUs.
            limit: Bytes of a GPU; None if unknown.
            shares_weights: Whether it may compute with the policy's tensors.
        """

    def decoding(self, *, rows: int, length: int, limit: int) -> Mapping[str, float]:
        """What a step of sampling reads on a GPU of `limit` bytes, in one process.

        `rows`: how many of the rows, of `length` tokens, are decoded together; `weights`: bytes of the weights; `token`: bytes
        of the keys and values of a token; `step_s`: minimum seconds of a step.
        """

    def not_counted(self) -> list[str]:
        """What `by_phase` leaves out."""

    def saving_overrides(self) -> list[str]:
        """Overrides that save memory."""


def ranks_of(run: RunConfig) -> int:
    """Number of ranks of each model."""
    cluster = run.cluster
    return 1 if cluster.backend == "in_process" else cluster.num_nodes * cluster.workers_per_node


def replicas_of(run: RunConfig, section: GenerationConfig, *, processes: int) -> int:
    """Number of replicas of the engine, of `processes` processes each."""
    if section.num_workers is not None:
        return section.num_workers
    own = section.resources
    workers = ranks_of(run) if own is None else own.num_nodes * own.workers_per_node
    return max(1, workers // processes)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows of one pass, all of the largest possible length.

    Attributes:
        rows: Number of rows, at least 1.
        length: Their length in tokens.
        several: Whether an optimizer step has more than one.
    """

    rows: int
    length: int
    several: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length."""
        return self.rows, self.length


def rows_of_step(run: RunConfig) -> int:
    """Number of rows of a step over all ranks; of preference pairs, both rows count."""
    needs = run.algorithm.runtime_needs
    if needs.rollouts is not None:
        return needs.rollouts.rows_per_draw
    if needs.records is not None:
        return needs.records.records_per_step * (2 if needs.records.pairs else 1)
    return 1


def longest_prompt(run: RunConfig) -> int:
    """Length in tokens of the longest prompt whose completion can still have all of its new tokens; at least 1."""
    generation = run.policy.generation
    new_tokens = 0 if generation is None else generation.max_new_tokens
    return max(1, run.policy.max_total_sequence_length - new_tokens)


def microbatch(run: RunConfig, model: PolicyConfig, *, training: bool) -> Microbatch:
    """The largest microbatch of a model on one rank; with `sequence_packing`, one row of the token budget."""
    length, ranks = min(run.policy.max_total_sequence_length, model.max_total_sequence_length), model.data_ranks(run.cluster)
    rows = rows_of_step(run)
    if training:
        rows = rows_per_optimizer_step(rows, batch_size=model.train_global_batch_size, multiple_of=1)
    on_rank = max(1, -(-rows // ranks))
    _, limit, _ = model.microbatch_limit(training=training)
    if model.sequence_packing.enabled:
        tokens = min(limit, on_rank * length)
        return Microbatch(rows=1, length=tokens, several=on_rank * length > tokens)
    together = max(1, limit // length) if model.dynamic_batching.enabled else limit
    return Microbatch(rows=min(together, on_rank), length=length, several=on_rank > together)


def with_shared_prefixes(run: RunConfig, batch: Microbatch) -> Microbatch:
    """The largest microbatch if rows of the same prompt compute it once; such rows become one sequence.

    All completions have the maximum length. The prompt is the longest one, or the longest one with which sharing is not
    worthwhile, whichever has more tokens to compute.
    """
    rollouts = run.algorithm.runtime_needs.rollouts
    prompt = min(longest_prompt(run), batch.length)
    completion = batch.length - prompt
    if rollouts is None or batch.rows == 1:
        return batch
    prompts = -(-batch.rows // min(batch.rows, rollouts.samples_per_prompt))
    saved = MAX_SHARE * batch.rows - prompts
    alone = prompt
    if saved > 0:
        alone = min(prompt, int((1 - MAX_SHARE) * batch.rows * completion / saved))
    together = prompts * prompt + batch.rows * completion
    if alone == prompt or batch.rows * (alone + completion) >= together:
        return replace(batch, length=alone + completion)
    return replace(batch, rows=1, length=together)
