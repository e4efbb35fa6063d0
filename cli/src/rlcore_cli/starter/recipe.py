"""Fits the config that `rlcore init` writes to GPUs: layout, LoRA or full training, microbatches, engine and transport.

Candidates are planned one after the other, the fastest first, and the first that fits is taken. Nothing is stored per model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rl_core.errors import ConfigError
from rl_train.sizes import format_size

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry
    from rl_train.plan.memory_plan import MemoryPlan

_FREE: Final = 0.08
"""Fraction of each GPU that is left for what a plan does not count: CUDA contexts, NCCL, gathered layers, fragmentation."""
_BATCHES: Final = ((False, 16384), (False, 8192), (True, 8192), (True, 0))
"""Activation checkpointing and tokens of a microbatch, which has at least one row."""
_ENGINES: Final = ((1, 0.5), (1, 0.8), (2, 0.5), (4, 0.5), (8, 0.5))
"""Tensor parallelism and share of the GPU of vLLM."""
_ENGINE_PHASES: Final = ("rollout", "refit")
_LORA_RANK: Final = 32
_LORA_RATE: Final = 10.0
"""Learning rate of adapters, relative to that of all weights (https://thinkingmachines.ai/blog/lora/)."""
_LARGER: Final = ("24GiB", "80GiB", "8x80GiB", "2x8x80GiB")

COMMENTS: Final = {
    "policy.optimizer.kwargs.lr": "1e-5 for models below a billion parameters, 1e-6 above; ten times as much with LoRA",
    "policy.precision": "weights and activations; optimizer state is float32",
    "policy.activation_checkpointing": "recomputes activations: a third more time, less memory",
    "policy.dynamic_batching.train_mb_tokens": "tokens of a training microbatch",
    "policy.dynamic_batching.logprob_mb_tokens": "tokens of a scoring microbatch",
    "policy.hf_cfg.data_parallel": "shards weights, gradients and optimizer state over the GPUs",
    "policy.hf_cfg.fsdp_num_shards": "one copy of the model per node",
    "policy.hf_cfg.lora.rank": "adapters are trained, because all weights do not fit",
    "policy.generation.backend": "samples on the same GPUs, between the training phases",
    "policy.generation.vllm_cfg.tensor_parallel_size": "GPUs that share a copy of the engine's weights",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "share of each GPU while the engine samples",
    "policy.generation.vllm_cfg.sleep_level": "frees the engine's memory before training; 0 keeps it",
    "policy.generation.refit_transport": "weights stay on the GPU (CUDA IPC)",
}
"""Comments of the keys that a recipe sets."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes with equal GPUs; `size` is the memory of one GPU in bytes."""

    nodes: int
    gpus: int
    size: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus} x {format_size(self.size)}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The sections of a config, and its plan."""

    values: Mapping[str, Any]
    plan: MemoryPlan

    def description(self, hardware: Hardware) -> str:
        """Comment lines for the config."""
        peak = f"{format_size(self.plan.peak)} on each GPU, in phase {self.plan.peak_phase}"
        return (
            f"# For {hardware}: computed by `rlcore plan`, not run on such hardware. Predicted peak:\n"
            f"# {peak}. {_FREE:.0%} of the GPU is left for what the plan does not count.\n"
        )


def parse_hardware(text: str) -> Hardware:
    """Hardware such as `24GiB`, `8xh100` or `2x8x80GiB`: nodes, GPUs of a node, memory or name of a GPU.

    Raises:
        UserError: It has another form.
    """
    from rl_train.plan.gpus import Gpu, parse_gpu

    matched = re.fullmatch(r"(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?(\S.*)", text.strip())
    numbers = (1, 1) if matched is None else (int(matched[1] or 1), int(matched[2] or 1))
    if matched is None or 0 in numbers:
        raise ConfigError(f"--gpus {text} is not a number of GPUs with their size. Write [[NODES x] GPUS x] SIZE: 2x8x80GiB.")
    gpu = parse_gpu(matched[3], "--gpus")
    return Hardware(nodes=numbers[0], gpus=numbers[1], size=gpu.memory if isinstance(gpu, Gpu) else gpu)


def fit(values: Mapping[str, Any], hardware: Hardware, registry: Registry, *, model: str) -> Recipe:
    """The first candidate that fits the hardware.

    Args:
        values: Sections of a config.
        hardware: What it is to run on.
        registry: Used to look up the backends.
        model: Name or absolute path of the model.

    Raises:
        ConfigError: None fits; says by how much, and on what hardware one would.
    """
    fitter = _Fitter(values, registry, model)
    if (recipe := fitter.first(hardware)) is not None:
        return recipe
    assert fitter.least is not None
    plan, room = fitter.least.plan, int(hardware.size * (1 - _FREE))
    others = [other for text in _LARGER if _is_larger(other := parse_hardware(text), hardware)]
    fitting = next((other for other in others if fitter.first(other, smallest=True) is not None), None)
    raise ConfigError(
        f"No candidate fits {hardware}: the smallest needs {format_size(plan.peak)} of each GPU in phase {plan.peak_phase}, "
        f"{format_size(plan.peak - room)} more than the {1 - _FREE:.0%} of a GPU that may be used, mostly "
        f"{plan.largest_process.largest_part}. "
        + (f"{fitting} would fit. " if fitting else "Use more GPUs or a smaller model. ")
        + "Shorter rows need less (`rlcore data show`)."
    )


def _is_larger(one: Hardware, other: Hardware) -> bool:
    return (one.nodes * one.gpus, one.size) > (other.nodes * other.gpus, other.size) and one.size >= other.size


class _Fitter:
    """Plans candidates; remembers the one that needs the least."""

    def __init__(self, values: Mapping[str, Any], registry: Registry, model: str) -> None:
        self._values, self._registry, self._model = values, registry, model
        self.least: Recipe | None = None

    def first(self, hardware: Hardware, *, smallest: bool = False) -> Recipe | None:
        """The first candidate that fits, or None.

        Args:
            hardware: What it is to run on.
            smallest: Whether to plan the smallest microbatches only.
        """
        cluster = {"num_nodes": hardware.nodes, "workers_per_node": hardware.gpus, "use_gpus": True}
        base = _merged(self._values, {"cluster": cluster, "policy": {"precision": "bfloat16"}})
        for layout in _layouts(hardware, base["policy"]["optimizer"]["kwargs"]["lr"]):
            for engine in self._engines(hardware):
                *larger, last = self._batches(_merged(base, {"policy": {**layout, **engine}}))
                least = self._planned(last, hardware)
                if least.plan.fits:
                    others = () if smallest else (self._planned(values, hardware) for values in larger)
                    return next((recipe for recipe in others if recipe.plan.fits), least)
                if least.plan.peak_phase not in _ENGINE_PHASES:
                    break  # the layout does not fit with any engine
        return None

    def _engines(self, hardware: Hardware) -> Iterator[Mapping[str, Any]]:
        if "generation" not in self._values["policy"] or "vllm" not in self._registry.names("generation"):
            yield {}
            return
        for processes, share in _ENGINES:
            if hardware.gpus % processes == 0:
                own = {"tensor_parallel_size": processes, "gpu_memory_utilization": share, "sleep_level": 2}
                yield {"generation": {"backend": "vllm", "refit_transport": "shared_memory", "vllm_cfg": own}}

    def _batches(self, values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The candidates of a layout, the largest microbatches first."""
        longest = values["policy"]["max_total_sequence_length"]
        policy = {key: value for key, value in values["policy"].items() if key != "train_micro_batch_size"}
        for checkpointing, budget in _BATCHES:
            tokens = max(longest, budget)
            batching = {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}
            yield {
                **values,
                "policy": {**policy, "activation_checkpointing": checkpointing, "dynamic_batching": batching},
            }

    def _planned(self, values: Mapping[str, Any], hardware: Hardware) -> Recipe:
        from rl_train.config.loader import load_config
        from rl_train.plan.planner import plan_memory

        # Rewards are written after the config, and the model's path is relative to its folder.
        read = _merged({key: value for key, value in values.items() if key != "env"}, {"policy": {"model_name": self._model}})
        run = load_config(read, registry=self._registry, stages=()).run
        plan = plan_memory(run, self._registry, on_gpu=True, limit=hardware.size)
        recipe = Recipe(values=values, plan=replace(plan, limit=int(hardware.size * (1 - _FREE))))
        if self.least is None or plan.peak < self.least.plan.peak:
            self.least = recipe
        return recipe


def _layouts(hardware: Hardware, rate: float) -> Iterator[Mapping[str, Any]]:
    yield {}
    if hardware.gpus > 1 and hardware.nodes > 1:
        yield {"hf_cfg": {"data_parallel": "fsdp2", "fsdp_num_shards": hardware.gpus}}
    if hardware.gpus * hardware.nodes > 1:
        yield {"hf_cfg": {"data_parallel": "fsdp2"}}
    lora = {"rank": _LORA_RANK, "alpha": _LORA_RANK}
    yield {"hf_cfg": {"lora": lora}, "optimizer": {"kwargs": {"lr": float(f"{_LORA_RATE * rate:.3g}")}}}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: _merged(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
            for key, value in over.items()
        },
    }
