"""Predicts the memory of a run by process, phase and part. Backends describe their own processes; this module combines them.

On GPUs, models and engine use the memory one after the other, as `rl_train.weight_sync.device_memory` arranges it; on CPUs,
nothing moves. Every row has the maximum length, because the data are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import Devices
from rl_core.data.generation_io import MOST_SET_IDS
from rl_core.data.images import RowImage
from rl_core.errors import RLCoreError
from rl_core.plugins.import_path import resolve
from rl_core.plugins.registry import Registry
from rl_core.weights.source import MOST_BYTES_ON_CPU
from rl_train.assembly.parts import loss_of
from rl_train.assembly.placement import resolve_adapters
from rl_train.assembly.preparation import Preparation
from rl_train.config.rules.models import loaded_models, models_of, with_models
from rl_train.config.schema import RunConfig
from rl_train.data.images import num_bytes
from rl_train.data.special_tokens import media_ids
from rl_train.diagnostics.model_files import read_model_config
from rl_train.files import format_size
from rl_train.plan.microbatches import (
    longest_prompt,
    microbatch,
    prompts_in,
    ranks_of,
    replicas_of,
    rows_of_step,
    with_shared_prefixes,
)
from rl_train.rollouts.trajectory import MOST_SET_BYTES

_DRIVER_LIBRARIES: Final = 470 * 2**20
"""Proportional set size of a driver that has connected to Ray and loaded tokenizer and data; config `ray` of
benchmarks/plan_vs_measured.py."""
_LONE_LIBRARIES: Final = 460 * 2**20
"""The same of a process that has driver, models, engine and environments, with data, tokenizer and compiled kernels."""
_ENVIRONMENT_LIBRARIES: Final = 220 * 2**20
"""The same of a process that has imported rlcore and no backend."""
_ROWS_READ: Final = 100
"""Most rows whose pictures are read."""
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
    pictures = _pictures(run, registry, not_counted)
    components = list(_models(run, registry, undescribed, not_counted, pictures=pictures, on_gpu=on_gpu))
    policy = memory_planner(registry, "policy", run.policy)
    shares = run.cluster.backend == "in_process" and not on_gpu and policy is not None and policy.is_shared
    gpu = limit if on_gpu else None
    given: dict[str, Any] = {"pictures": pictures, "gpu": gpu, "on_gpu": on_gpu, "shares_weights": shares}
    components += _engine(run, registry, undescribed, not_counted, **given)
    processes = _on_gpu(run, components) if on_gpu else _on_cpu(run, components, pictures)
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
    models = {name: model.for_devices(devices) for name, model in models_of(run).items()}
    policy = models["policy"]
    if policy.generation is not None:
        engine = policy.generation.for_devices(devices).for_policy(policy)
        models["policy"] = policy.model_copy(update={"generation": engine})
    return with_models(run, models)


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


@dataclass(frozen=True, kw_only=True)
class _Pictures:
    """The images of the row with the most bytes of pictures among those that were read, and the bytes that the driver keeps."""

    images: Sequence[RowImage] = ()
    kept: int = 0

    def of(self, planner: Any, name: str, not_counted: list[str], prompts: Any) -> dict[str, Any]:
        """The arguments of a planner that counts images."""
        if not self.images:
            return {}
        if not getattr(planner, "counts_images", False):
            not_counted.append(f"{name}: what its vision tower computes of images")
            return {}
        return {"images": self.images, "prompts": prompts}


_READ: Final[dict[str, tuple[_Pictures, str | None]]] = {}
"""Pictures by model and data: a command plans many candidates."""


def _pictures(run: RunConfig, registry: Registry, not_counted: list[str]) -> _Pictures:
    """The pictures of the first rows of the training data; none of a model of text."""
    if not media_ids(run.policy.model_name):
        return _Pictures()
    key = f"{run.policy.model_name} {run.data.model_dump_json()}"
    if key not in _READ:
        _READ[key] = _read_pictures(run, registry)
    pictures, problem = _READ[key]
    not_counted += [f"images: {problem}"] if problem else []
    return pictures


def _read_pictures(run: RunConfig, registry: Registry) -> tuple[_Pictures, str | None]:
    rows = min(run.data.check_rows or _ROWS_READ, _ROWS_READ)
    data = run.data.model_copy(update={"check_rows": rows, "validation": None, "validation_sets": {}})
    prepared = Preparation(run.model_copy(update={"data": data}), registry)
    try:
        _, reader = prepared.loaders, prepared.tokenizer.image_reader
    except RLCoreError as error:
        return _Pictures(), f"the rows cannot be read ({str(error).splitlines()[0]})"
    if not reader.largest:
        return _Pictures(), None
    every = 0 if prepared.data.train is None else len(prepared.data.train.records)
    kept = min(run.data.images.cache_mib << 20, every * sum(map(num_bytes, reader.largest)))
    return _Pictures(images=reader.largest, kept=kept), f"pictures that are larger than those of the first {rows} rows"


def _models(
    run: RunConfig,
    registry: Registry,
    undescribed: list[str],
    not_counted: list[str],
    *,
    pictures: _Pictures,
    on_gpu: bool,
) -> Iterator[_Component]:
    loss = loss_of(run, registry)
    nodes = max(1, run.cluster.num_nodes)
    for name, model in loaded_models(run).items():
        planner = memory_planner(registry, "policy", model)
        if planner is None:
            undescribed.append(f"all of `{name}`: its backend {model.backend} does not describe its memory")
            continue
        train, needs = None if model.frozen else microbatch(run, model, training=True), run.algorithm.runtime_needs
        is_scored = model.frozen or needs.samples or needs.extra_scored_rows
        score = microbatch(run, model, training=False) if is_scored else None
        prompts = {key: prompts_in(run, batch) for key, batch in (("train", train), ("score", score)) if batch is not None}
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
                **pictures.of(planner, name, not_counted, prompts),
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
    pictures: _Pictures,
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
    rollouts = run.algorithm.runtime_needs.rollouts
    prompts, each = (rows_of_step(run), 1) if rollouts is None else (rollouts.prompts_per_draw, rollouts.rollouts_per_prompt)
    rows = -(-prompts * each // replicas)
    shown = pictures.of(planner, "engine", not_counted, -(-rows // each))
    given = {"rows": rows, "prompt": longest_prompt(run), **shown}
    phases = dict(planner.by_phase(**given, on_gpu=on_gpu, limit=gpu, shares_weights=shares_weights))
    held = phases.pop("held")
    if not shares_weights:
        buffer = section.refit_buffer_mib * 2**20
        buffers = min(buffer if on_gpu else 2 * min(buffer, MOST_BYTES_ON_CPU), sum(held.values()))
        phases["refit"] = {**phases.get("refit", {}), "transfer buffers": buffers}
    not_counted += [f"engine: {left_out}" for left_out in planner.not_counted()]
    count = -(-replicas * planner.processes // max(1, run.cluster.num_nodes))
    yield _Component(name="engine", held=held, phases=phases, count=count, libraries=planner.libraries)


def _on_cpu(run: RunConfig, components: list[_Component], pictures: _Pictures) -> Iterator[ProcessPlan]:
    kept = {**_sets(run), **({"pictures": pictures.kept} if pictures.kept else {})}
    if run.cluster.backend == "in_process":
        libraries = {"libraries": max([_LONE_LIBRARIES, *(each.libraries for each in components)]), **kept}
        held = _sum(libraries, *(_named(each, each.held, components) for each in components))
        phases = {phase: _sum(held, parts) for each in components for phase, parts in each.phases.items()} or {"all": held}
        yield ProcessPlan(name=" + ".join(["driver", *(each.name for each in components)]), count=1, phases=phases)
        return
    yield ProcessPlan(name="driver", count=1, phases={"all": {"libraries": _DRIVER_LIBRARIES, **kept}})
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
    if run.algorithm.runtime_needs.teacher_decay is not None:
        yield "the moving average of the policy's weights, 4 bytes for each trained one"
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
    """Describes the memory of one rank of a policy. A class of a policy names it as `module:name` in `memory_planner`."""

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

        If it has the attribute `counts_images`, and rows have images, it also gets `images`, those of one prompt, and
        `prompts`, the number of prompts in a microbatch for `train` and `score`; an engine gets that of a step.
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
        of the keys and values of a token; `state`: bytes of a row that do not depend on its length, 0 by default (what is read
        and written counts twice); `step_s`: minimum seconds of a step.
        """

    def not_counted(self) -> list[str]:
        """What `by_phase` leaves out."""

    def saving_overrides(self) -> list[str]:
        """Overrides that save memory."""
