"""Computes the time of a step on GPUs from FLOPs, bytes and the speed of the GPU. Nothing runs.

A pass over a microbatch takes its FLOPs divided by a fraction of the peak; a step of sampling, the time to read weights, keys
and values, or the FLOPs if they take longer (https://arxiv.org/abs/2211.05102, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import NotSupportedError
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig
from rl_train.plan.gpus import Gpu
from rl_train.plan.planner import memory_planner, ranks_of

_READ: Final = 0.7
"""Assumed fraction of the memory bandwidth: 1,397 of 2,039 GB/s with Llama-2-7B on an A100
(https://github.com/pytorch-labs/gpt-fast)."""
_NETWORK: Final = 50e9
"""Assumed bytes per second between GPUs of two nodes: 400 Gbit/s for each (https://arxiv.org/abs/2407.21783, section 3.3)."""
_STATE_TRAFFIC: Final = 4
"""Bytes that an optimizer step reads and writes per byte of optimizer state: the state, master weights, gradients, weights."""


def assumptions(gpu: Gpu) -> tuple[str, ...]:
    """What the computed time assumes and leaves out, one sentence fragment each."""
    return (
        f"passes reach {gpu.utilization:.0%} of the peak in FLOP/s, sampling reads {_READ:.0%} of the memory bandwidth",
        f"GPUs of two nodes exchange {_NETWORK / 1e9:.0f} GB/s each",
        "sampling ends with a completion of max_new_tokens tokens, and all GPUs have the same number of tokens",
        "not counted: environments, validation, checkpoints, models that move to host memory and back, starts of kernels, "
        "exchange within a pass (tensor, context and expert parallelism, gathers of FSDP2)",
    )


def gpu_planner(
    run: RunConfig, registry: Registry, gpu: Gpu, longest: int, kind: str, section: PolicyConfig | GenerationConfig
) -> Any:
    """The `ModelTime` or `EngineTime` of a section on GPUs.

    Args:
        run: The config, with the lengths that are assumed.
        registry: Used to look up backends.
        gpu: What it runs on.
        longest: Tokens of the longest completion.
        kind: `policy` or `generation`.
        section: Section of the model or engine.

    Raises:
        NotSupportedError: Its backend does not describe its model.
    """
    planner, policy = memory_planner(registry, kind, section), memory_planner(registry, "policy", run.policy)
    is_model = isinstance(section, PolicyConfig)
    needed = ((section, planner, "matrix_sizes" if is_model else "decoding"), (run.policy, policy, "matrix_sizes"))
    for described, found, method in needed:
        if not hasattr(found, method):
            raise NotSupportedError(f"the backend {described.backend} does not describe what it computes")
    if isinstance(section, PolicyConfig):
        return _GpuModelTime(run, gpu, section, planner)
    return _GpuEngineTime(run, gpu, planner, policy.matrix_sizes(), longest)


class _GpuModelTime:
    """The time of one copy of a model, which several GPUs may share. See `ModelTime`."""

    def __init__(self, run: RunConfig, gpu: Gpu, model: PolicyConfig, planner: Any) -> None:
        self._run, self._gpu, self._model, self._planner = run, gpu, model, planner
        self._copies = model.data_ranks(run.cluster)

    def seconds(
        self, *, tokens: int, scored: int, length: int, training: bool, ranks: int, microbatches: float
    ) -> Mapping[str, float]:
        """Seconds of a microbatch and, if the model is trained, of an optimizer step; see `ModelTime`.

        Pipeline stages wait at both ends of a batch (https://arxiv.org/abs/2104.04473, section 2.2).
        """
        sizes = self._planner.matrix_sizes()
        gpus = max(1, ranks // self._copies)
        waiting = 1 + (self._planner.stages - 1) / max(1.0, microbatches)
        speed = gpus * self._gpu.flops(self._model.dtype_name) / waiting
        found = {"score": forward_flops(sizes, tokens=tokens, scored=tokens, length=length) / speed}
        if training:
            forward = forward_flops(sizes, tokens=tokens, scored=scored, length=length)
            frozen = 2 * (sizes.get("frozen", 0.0) * tokens + sizes.get("frozen_head", 0.0) * scored)
            again = forward if self._model.activation_checkpointing else 0.0
            found |= {"train": (3 * forward - frozen + again) / speed, "update": self._update(sizes, ranks, gpus)}
        return found

    def _update(self, sizes: Mapping[str, float], ranks: int, gpus: int) -> float:
        """Float32 gradients are summed over the copies by a ring, then the optimizer reads and writes its state."""
        trained = (sizes.get("trained", 0.0) + sizes.get("trained_head", 0.0)) / gpus
        exchanged = 2 * (self._copies - 1) / self._copies * 4 * trained / link(self._run, self._gpu)
        held = self._planner.by_phase(ranks=ranks, train=None, several=False, score=None, reference=False, on_gpu=True)["held"]
        state: int = held.get("optimizer state", 0)
        return exchanged + _STATE_TRAFFIC * state / (_READ * self._gpu.bandwidth)


class _GpuEngineTime:
    """The time of one replica of an engine. See `EngineTime`."""

    def __init__(self, run: RunConfig, gpu: Gpu, planner: Any, sizes: Mapping[str, float], longest: int) -> None:
        self._run, self._gpu, self._planner, self._sizes, self._longest = run, gpu, planner, sizes, longest

    def seconds(self, *, rows: int, prompts: int, prompt: int, completion: int) -> float:
        """Seconds in which it samples `rows` rows; each of the `prompts` prompts is computed once. See `EngineTime`.

        The last row has the maximum length, so the engine takes more steps, with fewer rows, than a completion has tokens.
        """
        longest = max(completion, self._longest)
        found = self._planner.decoding(rows=rows, length=prompt + completion, limit=self._gpu.memory)
        together = min(rows, found["rows"])
        speed = self._planner.processes * self._gpu.flops(self._run.policy.dtype_name)
        read = _READ * self._gpu.bandwidth
        steps = completion * rows / together + longest - completion
        in_step = rows * completion / steps
        products = forward_flops(self._sizes, tokens=in_step, scored=in_step, length=0) / speed
        keys_and_values = in_step * (prompt + completion / 2) * found["token"] / read
        step = max(found["weights"] / read, products) + keys_and_values
        prefill = forward_flops(self._sizes, tokens=prompts * prompt, scored=prompts, length=prompt) / speed
        return float(prefill + steps * max(step, found["step_s"]))

    def refit(self) -> float:
        """Seconds in which each GPU of the engine receives its weights from another one."""
        weights: float = self._planner.decoding(rows=1, length=1, limit=self._gpu.memory)["weights"]
        return weights / link(self._run, self._gpu)


def forward_flops(sizes: Mapping[str, float], *, tokens: float, scored: float, length: float) -> float:
    """FLOPs of a forward pass.

    Args:
        sizes: The matrices; see `rl_train.metrics.model_flops`.
        tokens: Tokens of all rows.
        scored: Those that the LM head is applied to.
        length: Tokens of a row, of which each attends to half on average.
    """
    matrices = 2 * (sizes.get("trained", 0.0) + sizes.get("frozen", 0.0)) * tokens
    head = 2 * (sizes.get("trained_head", 0.0) + sizes.get("frozen_head", 0.0)) * scored
    return matrices + head + 4 * sizes.get("attention", 0.0) * tokens * length / 2


def link(run: RunConfig, gpu: Gpu) -> float:
    """Bytes per second that a GPU of the run receives from another one, or copies if it is the only one."""
    if run.cluster.backend == "ray" and run.cluster.num_nodes > 1:
        return min(_NETWORK, gpu.link)
    return gpu.link if ranks_of(run) > 1 else _READ * gpu.bandwidth / 2
