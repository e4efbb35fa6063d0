"""The time of a step: computed for a GPU (`rlcore plan --gpu NAME`), or measured on this machine (`--measure`).

Computed, nothing runs. A pass over a microbatch takes its FLOPs divided by a fraction of the peak; a step of sampling, the time
to read weights, keys and values, or the FLOPs if they take longer (https://arxiv.org/abs/2211.05102, section 2). Backends
describe their matrices and caches with the `memory_planner` of `rl_train.plan.planner`.

Measured, two steps of the config run without loggers and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.shared_prefix import MAX_SHARE
from rl_core.errors import ConfigError, NotSupportedError, UserError
from rl_core.plugins.registry import Registry
from rl_train.algorithms.rewards import kl_in_reward
from rl_train.assembly.error_locations import with_location
from rl_train.assembly.parts import loss_of
from rl_train.assembly.run_assembly import build_run
from rl_train.config.algorithm import RolloutNeeds
from rl_train.config.loader import LoadedConfig
from rl_train.config.rules.models import loaded_models, role_of
from rl_train.config.schedules import OptimizerSteps, optimizer_steps
from rl_train.config.schema import CheckpointingConfig, LoggingConfig, ProfilingConfig, RunConfig
from rl_train.files import parse_size
from rl_train.metrics.measured import PEAK_TFLOPS
from rl_train.plan.microbatches import longest_prompt, microbatch, ranks_of, replicas_of, rows_of_step
from rl_train.plan.planner import memory_planner, resolved

_READ: Final = 0.7
"""Assumed fraction of the memory bandwidth: 1,397 of 2,039 GB/s with Llama-2-7B on an A100
(https://github.com/pytorch-labs/gpt-fast)."""
_NETWORK: Final = 50e9
"""Assumed bytes per second between GPUs of two nodes: 400 Gbit/s for each (https://arxiv.org/abs/2407.21783, section 3.3)."""
_STATE_TRAFFIC: Final = 4
"""Bytes that an optimizer step reads and writes per byte of optimizer state: the state, master weights, gradients, weights."""


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """The computed time of a step.

    Attributes:
        phases: Seconds by phase, of those that are computed.
        prompt: Assumed tokens of each prompt.
        completion: Assumed tokens of each completion.
        not_predicted: Phases without a time, each with the reason.
        gpu: Name of the GPU.
        assumed: What is assumed and left out, one sentence fragment each.
    """

    phases: Mapping[str, float]
    prompt: int
    completion: int
    not_predicted: Mapping[str, str]
    gpu: str
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None if a phase is not computed."""
        return None if self.not_predicted else sum(self.phases.values())


def plan_time(
    run: RunConfig, registry: Registry, *, gpu: Gpu, prompt: int | None = None, completion: int | None = None
) -> TimePlan:
    """The time of a step, without environments, validation and checkpoints.

    Args:
        run: The config.
        registry: Used to look up backends and the loss.
        gpu: What it runs on.
        prompt: Tokens of each prompt; by default as many as leave room for the completion.
        completion: Tokens of each completion; at most, and by default, `max_new_tokens`.
    """
    generation, limit = run.policy.generation, run.policy.max_total_sequence_length
    longest = 0 if generation is None else min(generation.max_new_tokens, limit - 1)
    run = _with_lengths(resolved(run, on_gpu=True), prompt, completion)
    generation, rollouts = run.policy.generation, run.algorithm.runtime_needs.rollouts
    components: dict[str, Callable[[], Mapping[str, float]]] = {}
    if generation is not None and rollouts is not None:
        components["rollout"] = partial(_sampling, run, registry, gpu, generation, rollouts, longest)
    for name, model in loaded_models(run).items():
        components[f"passes of {name}"] = partial(_passes, run, registry, gpu, name, model)
    phases, reasons = dict[str, float](), dict[str, str]()
    for name, compute in components.items():
        try:
            phases |= compute()
        except NotSupportedError as error:
            reasons[name] = str(error)
    if run.rollout.max_staleness:
        reasons["step"] = "rollouts and training overlap, because rollout.max_staleness is above 0"
    if rollouts is not None and rollouts.selects_groups:
        reasons["step"] = "how often a step samples prompts depends on their rewards"
    return TimePlan(
        phases=phases,
        prompt=longest_prompt(run),
        completion=0 if generation is None else generation.max_new_tokens,
        not_predicted=reasons,
        gpu=gpu.name,
        assumed=_assumptions(gpu),
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


def _assumptions(gpu: Gpu) -> tuple[str, ...]:
    return (
        f"passes reach {gpu.utilization:.0%} of the peak in FLOP/s, sampling reads {_READ:.0%} of the memory bandwidth",
        f"GPUs of two nodes exchange {_NETWORK / 1e9:.0f} GB/s each",
        "sampling ends with a completion of max_new_tokens tokens, and all GPUs have the same number of tokens",
        "not counted: environments, validation, checkpoints, models that move to host memory and back, starts of kernels, "
        "exchange within a pass (tensor, context and expert parallelism, gathers of FSDP2)",
    )


def _sampling(
    run: RunConfig, registry: Registry, gpu: Gpu, section: GenerationConfig, rollouts: RolloutNeeds, longest: int
) -> dict[str, float]:
    """Seconds of sampling and of a refit."""
    engine = engine_time(run, registry, gpu, section, longest)
    replicas = replicas_of(run, section, processes=engine.processes)
    prompts = -(-rollouts.prompts_per_draw // replicas)
    each = rollouts.rollouts_per_prompt
    lengths = {"prompt": longest_prompt(run), "completion": section.max_new_tokens}
    found = {"rollout": rollouts.sampled_fraction * engine.seconds(rows=prompts * each, prompts=prompts, **lengths)}
    if run.cluster.backend == "ray" or not memory_planner(registry, "policy", run.policy).is_shared:
        found["refit"] = engine.refit()
    return found


class EngineTime:
    """The time of one replica of an engine.

    Args:
        run: The config, with the lengths that are assumed.
        gpu: What it runs on.
        planner: The `EngineMemory` of its backend.
        sizes: The matrices of the policy; see `rl_train.metrics.measured`.
        longest: Tokens of the longest completion.
    """

    def __init__(self, run: RunConfig, gpu: Gpu, planner: Any, sizes: Mapping[str, float], longest: int) -> None:
        self._run, self._gpu, self._planner, self._sizes, self._longest = run, gpu, planner, sizes, longest
        self.processes: int = planner.processes
        """Number of its processes, each with its own GPU."""

    def seconds(self, *, rows: int, prompts: int, prompt: int, completion: int) -> float:
        """Seconds in which it samples `rows` rows of equal lengths; each of the `prompts` prompts is computed once.

        The last row has the maximum length, so the engine takes more steps, with fewer rows, than a completion has tokens.
        """
        longest = max(completion, self._longest)
        found = self._planner.decoding(rows=rows, length=prompt + completion, limit=self._gpu.memory)
        together = min(rows, found["rows"])
        speed = self.processes * self._gpu.flops(self._run.policy.dtype_name)
        read = _READ * self._gpu.bandwidth
        steps = completion * rows / together + longest - completion
        in_step = rows * completion / steps
        products = _forward_flops(self._sizes, tokens=in_step, scored=in_step, length=0) / speed
        keys_and_values = in_step * ((prompt + completion / 2) * found["token"] + found.get("state", 0.0)) / read
        step = max(found["weights"] / read, products) + keys_and_values
        prefill = _forward_flops(self._sizes, tokens=prompts * prompt, scored=prompts, length=prompt) / speed
        return float(prefill + steps * max(step, found["step_s"]))

    def refit(self) -> float:
        """Seconds in which each GPU of the engine receives its weights from another one."""
        weights: float = self._planner.decoding(rows=1, length=1, limit=self._gpu.memory)["weights"]
        return weights / _link(self._run, self._gpu)


def engine_time(run: RunConfig, registry: Registry, gpu: Gpu, section: GenerationConfig, longest: int) -> EngineTime:
    """The `EngineTime` of a section.

    Raises:
        NotSupportedError: The backend of the engine or of the policy does not describe what it computes.
    """
    engine = _planner(registry, "generation", section, "decoding")
    return EngineTime(run, gpu, engine, _planner(registry, "policy", run.policy, "matrix_sizes").matrix_sizes(), longest)


def _planner(registry: Registry, kind: str, section: PolicyConfig | GenerationConfig, method: str) -> Any:
    """The `memory_planner` of a section, which must have a method."""
    planner = memory_planner(registry, kind, section)
    if not hasattr(planner, method):
        raise NotSupportedError(f"the backend {section.backend} does not describe what it computes")
    return planner


def _passes(run: RunConfig, registry: Registry, gpu: Gpu, name: str, model: PolicyConfig) -> dict[str, float]:
    """Seconds of a model's passes and optimizer steps."""
    steps = None if model.frozen else optimizer_steps(run, name)
    if steps is None and not model.frozen:
        raise NotSupportedError(f"{run.algorithm_name} does not declare its number of optimizer steps")
    planner = _planner(registry, "policy", model, "matrix_sizes")
    batch, rollouts = microbatch(run, model, training=not model.frozen), run.algorithm.runtime_needs.rollouts
    length, tokens = min(run.policy.max_total_sequence_length, model.max_total_sequence_length), batch.rows * batch.length
    rows, scored = max(1, tokens // length), tokens
    count = -(-rows_of_step(run) // model.data_ranks(run.cluster)) * length / tokens
    if role_of(name) == "teacher" and run.teachers:  # tasks are assumed to have equally many rows
        count *= sum(each == model for each in run.teachers.values()) / len(run.teachers)
    if rollouts is not None:
        prompt = min(longest_prompt(run), length - 1)
        scored = rows * (length - prompt)
        shared = scored + prompt * -(-rows // rollouts.samples_per_prompt)
        if planner.shares_prefixes(on_gpu=True) and shared <= MAX_SHARE * tokens:
            tokens = shared
    sizes, gpus = planner.matrix_sizes(), max(1, ranks_of(run) // model.data_ranks(run.cluster))
    # Pipeline stages wait at both ends of a batch (https://arxiv.org/abs/2104.04473, section 2.2).
    microbatches = count / (1 if steps is None else steps.per_pass)
    speed = gpus * gpu.flops(model.dtype_name) / (1 + (planner.stages - 1) / max(1.0, microbatches))
    score = _forward_flops(sizes, tokens=tokens, scored=tokens, length=length) / speed
    times = dict.fromkeys(_scoring(run, registry, name, steps), count * score)
    extra = run.algorithm.runtime_needs.extra_scored_rows
    for phase in ("score", "reference") if name == "policy" and extra else ():
        times[phase] = times.get(phase, 0.0) + extra / rows_of_step(run) * count * score
    if steps is not None:
        forward = _forward_flops(sizes, tokens=tokens, scored=scored, length=length)
        frozen = 2 * (sizes.get("frozen", 0.0) * tokens + sizes.get("frozen_head", 0.0) * scored)
        again = forward if model.activation_checkpointing else 0.0
        times["train"] = count * steps.plan.passes * ((3 * forward - frozen + again) / speed)
        times["update"] = steps.plan.passes * steps.per_pass * _update(run, gpu, model, planner, sizes)
    return {phase if name == "policy" else f"{phase} {name}": value for phase, value in times.items()}


def _update(run: RunConfig, gpu: Gpu, model: PolicyConfig, planner: Any, sizes: Mapping[str, float]) -> float:
    """Float32 gradients are summed over the copies of the model by a ring, then the optimizer reads and writes its state."""
    ranks, copies = ranks_of(run), model.data_ranks(run.cluster)
    trained = (sizes.get("trained", 0.0) + sizes.get("trained_head", 0.0)) / max(1, ranks // copies)
    exchanged = 2 * (copies - 1) / copies * 4 * trained / _link(run, gpu)
    held = planner.by_phase(ranks=ranks, train=None, several=False, score=None, reference=False, on_gpu=True)["held"]
    state: int = held.get("optimizer state", 0)
    return exchanged + _STATE_TRAFFIC * state / (_READ * gpu.bandwidth)


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


def _forward_flops(sizes: Mapping[str, float], *, tokens: float, scored: float, length: float) -> float:
    """FLOPs of a forward pass.

    Args:
        sizes: The matrices; see `rl_train.metrics.measured`.
        tokens: Tokens of all rows.
        scored: Those that the LM head is applied to.
        length: Tokens of a row, of which each attends to half on average.
    """
    matrices = 2 * (sizes.get("trained", 0.0) + sizes.get("frozen", 0.0)) * tokens
    head = 2 * (sizes.get("trained_head", 0.0) + sizes.get("frozen_head", 0.0)) * scored
    return matrices + head + 4 * sizes.get("attention", 0.0) * tokens * length / 2


def _link(run: RunConfig, gpu: Gpu) -> float:
    """Bytes per second that a GPU of the run receives from another one, or copies if it is the only one."""
    if run.cluster.backend == "ray" and run.cluster.num_nodes > 1:
        return min(_NETWORK, gpu.link)
    return gpu.link if ranks_of(run) > 1 else _READ * gpu.bandwidth / 2


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Name of the model, a key of `PEAK_TFLOPS`.
        memory: Bytes of its memory.
        float32: Peak TFLOP/s in float32, without TF32.
        bandwidth: Bytes per second that it reads from its memory.
        link: Bytes per second that it sends to another GPU of its node: half of NVLink's figure, which counts both
            directions, or that of its PCIe interface.
        utilization: Assumed fraction of the peak that passes over microbatches reach.
    """

    name: str
    memory: int
    float32: float
    bandwidth: float
    link: float
    utilization: float = 0.40

    def flops(self, precision: str) -> float:
        """FLOP/s that passes are assumed to reach."""
        return self.utilization * 1e12 * (self.float32 if precision == "float32" else PEAK_TFLOPS[self.name])


_GIB: Final = 2**30
_A100: Final = 0.54
GPUS: Final[Mapping[str, Gpu]] = {
    "a10": Gpu(name="A10", memory=24 * _GIB, float32=31.2, bandwidth=0.600e12, link=32e9),
    "a40": Gpu(name="A40", memory=48 * _GIB, float32=37.4, bandwidth=0.696e12, link=56e9),
    "a100": Gpu(name="A100", memory=80 * _GIB, float32=19.5, bandwidth=2.039e12, link=300e9, utilization=_A100),
    "a100-40gb": Gpu(name="A100", memory=40 * _GIB, float32=19.5, bandwidth=1.555e12, link=300e9, utilization=_A100),
    "b200": Gpu(name="B200", memory=178 * _GIB, float32=75.0, bandwidth=7.7e12, link=900e9),
    "h100": Gpu(name="H100", memory=80 * _GIB, float32=67.0, bandwidth=3.35e12, link=450e9),
    "h100-pcie": Gpu(name="H100 PCIe", memory=80 * _GIB, float32=51.0, bandwidth=2.0e12, link=64e9),
    "h200": Gpu(name="H200", memory=140 * _GIB, float32=67.0, bandwidth=4.8e12, link=450e9),
    "l4": Gpu(name="L4", memory=24 * _GIB, float32=30.3, bandwidth=0.300e12, link=32e9),
    "l40s": Gpu(name="L40S", memory=48 * _GIB, float32=91.6, bandwidth=0.864e12, link=32e9),
    "rtx3090": Gpu(name="RTX 3090", memory=24 * _GIB, float32=35.6, bandwidth=0.936e12, link=32e9),
    "rtx4090": Gpu(name="RTX 4090", memory=24 * _GIB, float32=82.6, bandwidth=1.008e12, link=32e9),
}
"""GPUs by the name that users write, from NVIDIA's data sheets and architecture white papers; SXM modules, if there are any.

The utilization is 38 to 43 % on H100 (https://arxiv.org/abs/2407.21783, table 4) and 54.2 % on A100
(https://arxiv.org/abs/2205.05198, abstract). For the others, that of H100 is assumed.
"""


def parse_gpu(text: str, option: str) -> Gpu | int:
    """A GPU by its name, such as `h100`, or the bytes of a size such as `80GiB`.

    Raises:
        UserError: It is neither; lists the names.
    """
    name = text.strip().lower().replace(" ", "")
    if name in GPUS:
        return GPUS[name]
    if name[:1].isdigit():
        return parse_size(text, option)
    raise UserError(f"{option} {text} is not a known GPU. Write a size such as 80GiB, or one of: {', '.join(GPUS)}.")


_STEPS: Final = 2
"""The first step also prepares what later steps reuse, so the second is measured."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The time of the second step.

    Attributes:
        seconds: Seconds of the step.
        phases: Seconds of its phases; what is outside of them is missing.
        completion: Mean number of sampled tokens of its completions; None if it does not sample.
    """

    seconds: float
    phases: Mapping[str, float]
    completion: float | None


def measure_step(loaded: LoadedConfig, registry: Registry) -> MeasuredStep:
    """Run two steps with the config's own models and data. All processes and files of the run are gone afterwards.

    Args:
        loaded: The config.
        registry: Used to look up components.

    Raises:
        ConfigError: The run cannot start, or has only one step.
    """
    quiet = {"logger": LoggingConfig(), "checkpointing": CheckpointingConfig(enabled=False), "profiling": ProfilingConfig()}
    loaded = replace(loaded, run=loaded.run.model_copy(update=quiet))
    name, steps = loaded.run.algorithm_name, dict[int, Mapping[str, float]]()
    with TemporaryDirectory(prefix="rlcore-plan-") as folder, with_location(loaded), ExitStack() as exits:
        run = build_run(loaded, folder=Path(folder), registry=registry, exits=exits, before_models=_check_steps)
        # Only now, so that schedules are those of the whole run.
        last = {"max_num_steps": _STEPS, "val_at_start": False, "val_at_end": False}
        algorithm = run.config.algorithm.model_copy(update=last)
        run.config = run.config.model_copy(update={"algorithm": algorithm})
        run.on_step = steps.__setitem__
        loaded.components[name].load()(algorithm, run)
    if _STEPS not in steps:
        raise ConfigError(f"{name} ended before its second step, which is the one that is measured.", key=name)
    metrics = steps[_STEPS]
    phases = {key.removeprefix("time/").removesuffix("_s"): value for key, value in metrics.items() if key.startswith("time/")}
    return MeasuredStep(seconds=phases.pop("step"), phases=phases, completion=metrics.get("length/mean"))


def _check_steps(run: RunConfig, _: object) -> None:
    if run.algorithm.max_num_steps < _STEPS:
        raise ConfigError(
            f"is {run.algorithm.max_num_steps}, but the second step is the one that is measured: allow two steps.",
            key=f"{run.algorithm_name}.max_num_steps",
        )
