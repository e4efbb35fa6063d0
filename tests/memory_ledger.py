"""A ledger of GPU and host memory, by phase of a run.

`counting_workers` keeps it: workers that follow the rules by which the workers of `hf`, `megatron` and `vllm` allocate, move
and free tensors, for the manifest of a real model. `test_ledger_against_workers.py` compares the sizes with a real worker.

Counted are tensors, and for activations the estimate of https://arxiv.org/abs/2205.05198, section 4: 34 bytes per token and
hidden unit of a layer without attention scores; 2 between layers that are recomputed. CUDA contexts, NCCL buffers and
fragmentation are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from rl_core.errors import EngineDiedError

GPU = 79 * 2**30
"""Bytes that CUDA reports for a GPU of 80 GB."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model.

    Attributes:
        manifest: name to (shape, dtype) of its weights.
        hidden: width of a layer.
        layers: number of layers.
        vocab: number of tokens.
        kv_token_bytes: bytes of keys and values per token in bfloat16.
    """

    manifest: Mapping[str, tuple[tuple[int, ...], str]]
    hidden: int
    layers: int
    vocab: int
    kv_token_bytes: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(torch.Size(shape).numel() for shape, _ in self.manifest.values())

    @property
    def largest_tensor(self) -> int:
        """Number of elements of the largest weight."""
        return max(torch.Size(shape).numel() for shape, _ in self.manifest.values())

    @property
    def layer(self) -> int:
        """Number of weights of one decoder layer."""
        return sum(torch.Size(shape).numel() for name, (shape, _) in self.manifest.items() if ".layers.0." in name)


@cache
def model_of(folder: Path, *, gguf_file: str | None = None) -> Model:
    """The sizes of a model folder, or of a GGUF file in a folder; no weight is read."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **({} if gguf_file is None else {"gguf_file": gguf_file}))
    with init_empty_weights(include_buffers=True):
        model = AutoModelForCausalLM.from_config(config)
    manifest = {name: (tuple(each.shape), "bfloat16") for name, each in model.named_parameters()}
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        manifest=manifest,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        kv_token_bytes=2 * config.num_hidden_layers * heads * head_dim * 2,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread over GPUs, and how large its microbatches are.

    Attributes:
        model: model of policy, critic and teacher.
        gpus: number of GPUs, each with one rank of the policy and one process of the engine.
        policy: "hf" or "megatron".
        engine: "vllm" or "hf".
        fsdp2: whether `hf` shards weights, gradients and optimizer state over all GPUs.
        tensor: tensor-parallel size of `megatron`.
        pipeline: pipeline-parallel size of `megatron`.
        distributed_optimizer: whether `megatron` shards the optimizer state over data-parallel ranks.
        engine_tensor: tensor-parallel size of the engine.
        utilization: `gpu_memory_utilization` of vLLM.
        tokens: tokens of a microbatch, in training and in scoring.
        rows: rows that the `hf` engine decodes together.
        length: longest row in tokens.
        masters_leave: whether `megatron` moves its float32 master weights and its weights to host memory.
        engine_leaves: whether the `hf` engine moves its weights to host memory when it has finished.
        gathers_on_save: whether `megatron` gathers the sharded optimizer state on every data-parallel rank to save it, not
            only on the first.
        loads_whole: whether `fsdp2` loads the whole float32 model on each rank before it is sharded.
    """

    model: Model
    gpus: int = 1
    policy: str = "hf"
    engine: str = "vllm"
    fsdp2: bool = False
    tensor: int = 1
    pipeline: int = 1
    distributed_optimizer: bool = True
    engine_tensor: int = 1
    utilization: float = 0.6
    tokens: int = 8192
    rows: int = 256
    length: int = 4096
    masters_leave: bool = True
    engine_leaves: bool = True
    gathers_on_save: bool = False
    loads_whole: bool = False

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.gpus // (self.tensor * self.pipeline)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of one model on one GPU when everything is there."""

    weights: int
    masters: int
    moments: int
    gradients: int

    @classmethod
    def of(cls, layout: Layout, *, precision: str, frozen: bool) -> ModelBytes:
        """The bytes of a model with Adam; a frozen one has only weights."""
        parameters, trained = layout.model.parameters, 0 if frozen else 1
        width = 2 if precision == "bfloat16" else 4
        if layout.policy == "megatron":
            shard = parameters // (layout.tensor * layout.pipeline)
            state = shard // (layout.data_ranks if layout.distributed_optimizer else 1)
            masters = 4 * state if width == 2 else 0
            return cls(
                weights=width * shard, masters=masters * trained, moments=8 * state * trained, gradients=4 * shard * trained
            )
        if layout.fsdp2 and layout.gpus > 1:
            shard = parameters // layout.gpus
            return cls(weights=4 * shard, masters=0, moments=8 * shard * trained, gradients=4 * shard * trained)
        masters = 4 * parameters if width == 2 else 0
        return cls(
            weights=width * parameters,
            masters=masters * trained,
            moments=8 * parameters * trained,
            gradients=4 * parameters * trained,
        )


@dataclass
class Ledger:
    """Bytes on one GPU and in the host memory of its ranks, now and at the peak of each phase of a run."""

    layout: Layout
    phase: str = "load"
    gpu: dict[tuple[str, str], int] = field(default_factory=dict)
    """(owner, kind) to bytes now."""
    host: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same in host memory."""
    peaks: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    """Phase to the contents of the GPU when they were largest."""
    host_peaks: dict[str, int] = field(default_factory=dict)
    """Phase to the largest number of bytes in host memory."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(owner, method) of each call of a worker that moves or uses memory."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Method to the number of its call at which the engine dies, from 1."""
    shares_weights: bool = False
    """Whether the engine computes with the policy's own tensors."""
    violations: list[str] = field(default_factory=list)
    """Moments at which tensors were on the GPU that should have left it."""

    def put(self, owner: str, *, on_gpu: bool, **kinds: int) -> None:
        """Set the bytes of some kinds of tensors of an owner; they are on the GPU or in host memory."""
        here, there = (self.gpu, self.host) if on_gpu else (self.host, self.gpu)
        for kind, size in kinds.items():
            there.pop((owner, kind), None)
            here[owner, kind] = size
        self._observe()

    def free(self, owner: str, *kinds: str) -> None:
        """Free tensors of an owner."""
        for kind in kinds:
            self.gpu.pop((owner, kind), None)
            self.host.pop((owner, kind), None)

    @contextmanager
    def passing(self, owner: str, *, on_gpu: bool = True, **kinds: int) -> Iterator[None]:
        """Hold tensors for the duration of the block."""
        self.put(owner, on_gpu=on_gpu, **kinds)
        try:
            yield
        finally:
            self.free(owner, *kinds)

    def call(self, owner: str, method: str) -> None:
        """Record a call of a worker."""
        self.calls.append((owner, method))
        if owner == "engine" and self.calls.count((owner, method)) == self.deaths.get(method):
            del self.deaths[method]
            self.free("engine", "weights", "cache")
            raise EngineDiedError("the engine of the test has died")

    def peak(self, phase: str, owner: str | None = None) -> int:
        """Bytes on the GPU at the peak of a phase, of one owner or of all."""
        return sum(size for (of, _), size in self.peaks[phase].items() if owner in (None, of))

    def _observe(self) -> None:
        if sum(self.gpu.values()) >= sum(self.peaks.get(self.phase, {}).values()):
            self.peaks[self.phase] = {key: size for key, size in self.gpu.items() if size}
        self.host_peaks[self.phase] = max(self.host_peaks.get(self.phase, 0), sum(self.host.values()))
        if (found := self._violation()) is not None:
            self.violations.append(f"{self.phase}: {found}")

    def _violation(self) -> str | None:
        """What is on the GPU together although it should not be; None if there is nothing."""
        held = {f"{owner}.{kind}" for (owner, kind), size in self.gpu.items() if size}
        models = {name.partition(".")[0] for name in held} - {"engine"}
        sent = {"policy.weights", "policy.buckets", "policy.gathered"}
        tensors = {name for name in held if not name.startswith("engine.")}
        if self.shares_weights:
            tensors.discard("policy.weights")
            models = {name.partition(".")[0] for name in tensors}
        if len(models) > 1 or ("engine.cache" in held and models) or ("engine.weights" in held and not tensors <= sent):
            return ", ".join(sorted(held))
        return None
