"""The section `policy` of the Megatron backend, its `megatron_cfg`, and checks of both. Does not import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path as file_path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, model_validator

from rl_backends_base.lora_section import AdapterConfig
from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import PolicyConfig, Section
from rl_core.config.section import Devices, model_path_problem
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.config.schema import ClusterConfig, RunSections


_MEGATRON_LAYERS: Final = {
    "linear_qkv": "q_proj, k_proj and v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj and up_proj",
    "linear_fc2": "down_proj",
}


class MegatronLoRAConfig(AdapterConfig):
    """Low-rank adapters (LoRA): train small matrices added to frozen linear layers instead of all weights.

    Layers are named as in Transformers (`q_proj`, `gate_proj`), also where Megatron-Core fuses them. Experts are not adapted.
    """

    @property
    def scale(self) -> float:
        """The scale s in W x + s B A x."""
        return float(self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank))

    @model_validator(mode="before")
    @classmethod
    def _check_supported(cls, given: Any) -> Any:
        for key in ("dropout", "use_dora", "autocast", "target_parameters"):
            if isinstance(given, dict) and key in given:
                raise ValueError(f"{key} is only supported by the backend `hf`: remove it, or set `policy.backend: hf`")
        return given

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.target_modules if isinstance(self.target_modules, list) else ():
            if (layers := _MEGATRON_LAYERS.get(name.rpartition(".")[2])) is not None:
                raise ValueError(
                    f"target_modules: Megatron-Core's {name} consists of {layers}, which are the names to use here"
                )
        return self


class MegatronConfig(Section):
    """`policy.megatron_cfg`: parallelism and options of Megatron-Core.

    Ranks that remain after tensor, pipeline and context parallelism are data parallel.
    """

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Tensor parallelism: number of ranks that share each weight matrix. They are adjacent ranks; keep them on one node."""
    sequence_parallel: bool = False
    """Whether to shard activations between matrix multiplications along the sequence over the tensor-parallel ranks: less
    memory, same communication volume."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Pipeline parallelism: number of stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of model chunks per stage (interleaved schedule): smaller pipeline bubbles, more communication."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers in the first stage; by default, layers are divided evenly."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers in the last stage; by default, layers are divided evenly."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Context parallelism: number of ranks that share each row, for rows that are too long for one device."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Expert parallelism: number of ranks, among the data- and context-parallel ones, that the experts of a mixture are divided
    over."""
    expert_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Number of ranks that share each matrix of an expert. Defaults to 1 with expert parallelism and to
    `tensor_model_parallel_size` without. More than one with expert parallelism requires NCCL."""
    use_distributed_optimizer: bool | None = None
    """Whether to shard optimizer state and float32 weights over the data-parallel ranks. By default, Adam does on GPUs, and a
    resumed run does what its checkpoint did."""
    overlap_grad_reduce: bool = False
    """Whether to overlap the gradient reduction over data-parallel ranks with the backward pass."""
    overlap_param_gather: bool = False
    """Whether to overlap gathering the updated weights with the next forward pass. Requires `use_distributed_optimizer` and
    `overlap_grad_reduce`."""
    ddp_bucket_size: int | None = Field(default=None, ge=1)
    """Number of parameters per gradient bucket; chosen by Megatron by default."""
    grad_reduce_in_fp32: bool = True
    """Whether to accumulate and reduce gradients in float32 if weights are bfloat16."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """What to recompute in the backward pass: only attention (`selective`), or whole layers (`full`).
    `policy.activation_checkpointing` means `full`."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which whole layers to recompute: `uniform` recomputes all of them in groups of `recompute_num_layers`, `block` only the
    first `recompute_num_layers` of each stage."""
    recompute_num_layers: int = Field(default=1, ge=1)
    """Number of layers; see `recompute_method`."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the layers: `local` (PyTorch) or `transformer_engine` (GPU only). `auto` uses Transformer Engine if
    it is installed and no adapters are trained."""
    use_flash_attention: bool | None = None
    """Whether to use flash attention. True fails without a flash attention kernel; false uses the plain kernel. By default, the
    fastest available kernel is used."""
    moe_grouped_gemm: bool | None = None
    """Whether to compute all experts of a rank in one kernel. Requires Transformer Engine, and is the default with it."""
    make_vocab_size_divisible_by: int = Field(default=1, ge=1)
    """Pad each rank's shard of the vocabulary to a multiple of this value. Padding entries have probability 0."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of positions for which float32 logits are in memory at one time."""
    lora: MegatronLoRAConfig | None = None
    """Train low-rank adapters with frozen base weights; null trains all weights."""
    reference: bool = True
    """Whether a reference policy is available: a frozen copy of the initial weights, made when it is first needed. With `lora`,
    the adapters are disabled instead."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the tokenizer."""
    seed: int = 0
    """Seed of `generate` for rows that do not specify one."""
    distributed_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of collective operations between ranks, in seconds."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_ranks(self) -> int:
        """`expert_tensor_parallel_size`, or its default."""
        default = 1 if self.expert_model_parallel_size > 1 else self.tensor_model_parallel_size
        return self.expert_tensor_parallel_size or default

    @model_validator(mode="after")
    def _check_parallel_sizes(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel shards activations over tensor-parallel ranks, but there is only one: increase "
                "tensor_model_parallel_size, or leave sequence_parallel out"
            )
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size splits pipeline stages into chunks, but there is only one stage: "
                "increase pipeline_model_parallel_size, or leave it out"
            )
        uneven = self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage
        if uneven and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage require several stages: increase "
                "pipeline_model_parallel_size, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_option_requirements(self) -> Self:
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather requires use_distributed_optimizer and overlap_grad_reduce: set both, or leave "
                "overlap_param_gather out"
            )
        if self.expert_model_parallel_size == 1 and self.expert_tensor_ranks != self.tensor_model_parallel_size:
            raise ValueError(
                f"expert_tensor_parallel_size {self.expert_tensor_ranks} differs from tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} without expert parallelism: Megatron-Core would not sum the gradients of "
                "experts that several ranks hold. Leave it out, or increase expert_model_parallel_size"
            )
        if self.moe_grouped_gemm and self.transformer_impl == "local":
            raise ValueError(
                "moe_grouped_gemm requires Transformer Engine: leave it out, or set transformer_impl: transformer_engine"
            )
        if self.lora is not None and (self.moe_grouped_gemm or self.transformer_impl == "transformer_engine"):
            key = "moe_grouped_gemm" if self.moe_grouped_gemm else "transformer_impl: transformer_engine"
            raise ValueError(
                f"{key} cannot be combined with lora: Transformer Engine fuses layers with the norm before them, and adapters "
                "need its result. Remove one of them"
            )
        return self


class MegatronPolicyConfig(PolicyConfig):
    """`policy` with `backend: megatron`."""

    backend: str = "megatron"
    """Name of a registered policy backend, or the dotted path of its class."""
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """Settings specific to this backend."""

    @property
    def missing_reference(self) -> str | None:
        return None if self.megatron_cfg.reference else "policy.megatron_cfg.reference is false"

    @property
    def lora_rank(self) -> int | None:
        return None if self.megatron_cfg.lora is None else self.megatron_cfg.lora.rank

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """A number of ranks that does not fit the parallelism; parallelism and LoRA targets that do not fit a local model."""
        if (problem := model_path_problem(self.model_name)) is not None:
            yield ("model_name",), problem
        if (lora := self.megatron_cfg.lora) is not None:
            for key, problem in lora.problems(self.model_name, head=self.head):
                yield ("megatron_cfg", "lora", key), problem
        # Components created in Python bring their own cluster.
        if "cluster" not in run.model_fields_set:
            return
        megatron = self.megatron_cfg
        needed, ranks = megatron.ranks_per_replica, super().data_ranks(run.cluster)
        if ranks % needed:
            sizes = f"{megatron.tensor_model_parallel_size} x {megatron.pipeline_model_parallel_size} x "
            yield (
                ("megatron_cfg",),
                f"tensor x pipeline x context = {sizes}{megatron.context_parallel_size} = {needed} ranks hold one copy of the "
                f"model, but the cluster has {ranks}: use a multiple of {needed} (`cluster.backend: ray`, "
                "`cluster.num_nodes` x `cluster.workers_per_node`).",
            )
            return
        described = _read_model_config(self.model_name)
        if described is not None:
            on_gpu = run.cluster.use_gpus is not False
            for key, reason in find_incompatibilities(described, megatron, world_size=ranks, on_gpu=on_gpu):
                yield ("megatron_cfg", key), reason

    def deep_conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """LoRA targets, by the layers of the model's family."""
        lora = self.megatron_cfg.lora
        if self.python is None and lora is not None:
            from rl_backends_megatron.hf_folder import find_folder, read_config
            from rl_backends_megatron.lora_targets import adapted_layers

            adapted_layers(read_config(find_folder(self.model_name, weights=False)), lora, model_name=self.model_name)
        yield from ()

    def data_ranks(self, cluster: ClusterConfig) -> int:
        """Number of copies of the model in the cluster."""
        return max(1, super().data_ranks(cluster) // self.megatron_cfg.ranks_per_replica)

    def for_devices(self, devices: Devices) -> Self:
        """This section with `precision` and `use_distributed_optimizer`."""
        shards = self.shards_optimizer(on_gpu=devices.use_gpus)
        megatron = self.megatron_cfg.model_copy(update={"use_distributed_optimizer": shards})
        return super().for_devices(devices).model_copy(update={"megatron_cfg": megatron})

    def shards_optimizer(self, *, on_gpu: bool) -> bool:
        """`megatron_cfg.use_distributed_optimizer`, or its default."""
        given = self.megatron_cfg.use_distributed_optimizer
        return on_gpu and self.optimizer.name in ADAMS if given is None else given

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer.groups:
            raise ValueError(
                f"optimizer.groups ({', '.join(self.optimizer.groups)}) is not supported: Megatron-Core updates all weights "
                "with one optimizer, and its ranks have shards of matrices. Remove it, or use the backend `hf`"
            )
        if self.optimizer.name not in OPTIMIZER_KEYS:
            raise ValueError(
                f"optimizer.name {self.optimizer.name!r} is not supported: Megatron-Core has its own optimizers, which shard "
                f"their state over ranks: {', '.join(OPTIMIZER_KEYS)}"
            )
        if self.optimizer.name not in ADAMS and self.megatron_cfg.use_distributed_optimizer:
            raise ValueError(
                f"megatron_cfg.use_distributed_optimizer: Megatron-Core shards only the state of Adam, but optimizer.name is "
                f"{self.optimizer.name!r}. Use {' or '.join(ADAMS)}, or leave use_distributed_optimizer out"
            )
        allowed = OPTIMIZER_KEYS[self.optimizer.name]
        for key in self.optimizer.kwargs:
            if key not in allowed:
                raise ValueError(
                    f"optimizer.kwargs.{key}: {self.optimizer.name} in Megatron-Core supports {', '.join(allowed)}; leave "
                    "it out, or use the backend `hf`"
                )
        return self


_SHAPE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")


def _read_model_config(model_name: str) -> SimpleNamespace | None:
    """The config.json of a model folder; None if it is missing or lacks the values needed here."""
    try:
        content = json.loads((file_path(model_name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and "model_type" in content and all(isinstance(content.get(key), int) for key in _SHAPE)
    return SimpleNamespace(**content) if whole else None


ADAMS = ("torch.optim.AdamW", "torch.optim.Adam")
_ADAM = ("lr", "betas", "eps", "weight_decay", "decay_matrices_only")
OPTIMIZER_KEYS = {
    **dict.fromkeys(ADAMS, _ADAM),
    "torch.optim.SGD": ("lr", "momentum", "weight_decay", "decay_matrices_only"),
}
"""Optimizers supported by Megatron-Core, by their names in `policy.optimizer`, and their arguments."""


def check_compatibility(hf: Any, config: MegatronConfig, *, world_size: int, on_gpu: bool) -> None:
    """Raise one error with all incompatibilities.

    Args:
        hf: the Hugging Face config.
        config: `policy.megatron_cfg`.
        world_size: number of ranks of the policy.
        on_gpu: whether they have GPUs (and thus NCCL).

    Raises:
        ConfigError: lists every incompatible key with possible values.
    """
    problems = find_incompatibilities(hf, config, world_size=world_size, on_gpu=on_gpu)
    if problems:
        raise ConfigError(
            "\n".join(f"`policy.megatron_cfg.{key}`: {reason}" for key, reason in problems),
            key=f"policy.megatron_cfg.{problems[0][0]}",
        )


def find_incompatibilities(hf: Any, config: MegatronConfig, *, world_size: int, on_gpu: bool) -> list[tuple[str, str]]:
    """Each incompatible key of `megatron_cfg` with the reason; see `check_compatibility`."""
    lines = [
        *_ranks(config, world_size),
        *_tensor(hf, config),
        *_pipeline(hf, config),
        *_experts(hf, config, world_size, on_gpu),
        *_engine(config, on_gpu),
    ]
    return [(key, reason) for key, _, reason in (line.partition("`: ") for line in lines)]


def _ranks(megatron: MegatronConfig, world_size: int) -> Iterator[str]:
    needed = megatron.ranks_per_replica
    if world_size % needed:
        yield (
            f"tensor_model_parallel_size`: tensor x pipeline x context = {megatron.tensor_model_parallel_size} x "
            f"{megatron.pipeline_model_parallel_size} x {megatron.context_parallel_size} = {needed} ranks hold one copy of "
            f"the model, but there are {world_size}: use a multiple of {needed} workers "
            "(`cluster.num_nodes` x `cluster.workers_per_node`)."
        )


def _tensor(hf: Any, megatron: MegatronConfig) -> Iterator[str]:
    tensor = megatron.tensor_model_parallel_size
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    if heads % tensor:
        yield f"tensor_model_parallel_size`: {tensor} does not divide {heads} attention heads; use a divisor of {heads}."
    if groups % tensor and tensor % groups:
        yield (
            f"tensor_model_parallel_size`: {tensor} is neither a divisor nor a multiple of {groups} key-value heads; use "
            "one that is."
        )
    ffn = hf.intermediate_size
    if ffn % tensor:
        yield f"tensor_model_parallel_size`: {tensor} does not divide the MLP's width {ffn}."


def _pipeline(hf: Any, megatron: MegatronConfig) -> Iterator[str]:
    stages = megatron.pipeline_model_parallel_size
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    layers = hf.num_hidden_layers
    even_stages = stages - (first is not None) - (last is not None)
    even_layers = layers - (first or 0) - (last or 0)
    if even_layers < even_stages * chunks:
        yield (
            f"pipeline_model_parallel_size`: {layers} layers are too few for {stages} stages of {chunks} chunks"
            f"{' with the given first and last stage' if first or last else ''}; each chunk needs at least one layer."
        )
    elif (
        (even_layers if even_stages == 0 else even_layers % (even_stages * chunks))
        or (first or 0) % chunks
        or (last or 0) % chunks
    ):
        yield (
            f"pipeline_model_parallel_size`: {layers} layers do not divide evenly into {stages} stages of {chunks} chunks. "
            "Use a divisor, or set another number of layers for the first or last stage "
            "(`num_layers_in_first_pipeline_stage`, `num_layers_in_last_pipeline_stage`)."
        )


def _experts(hf: Any, megatron: MegatronConfig, world_size: int, on_gpu: bool) -> Iterator[str]:
    expert_parallel, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_ranks
    experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)
    if experts is None:
        if expert_parallel > 1:
            yield f"expert_model_parallel_size`: {hf.model_type} models have no experts; leave it at 1."
        return
    if experts % expert_parallel:
        yield f"expert_model_parallel_size`: {expert_parallel} does not divide {experts} experts; use a divisor."
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield (
            "sequence_parallel`: required for a mixture of experts with tensor parallelism, because Megatron-Core would "
            "otherwise send every token to the experts once per rank; set it to true."
        )
    ranks_per_stage = world_size // megatron.pipeline_model_parallel_size
    if ranks_per_stage % (expert_parallel * tensor):
        yield (
            f"expert_model_parallel_size`: {expert_parallel} x {tensor} (expert parallel x expert tensor parallel) "
            f"does not divide the {ranks_per_stage} ranks of a pipeline stage."
        )
    if expert_parallel > 1 and tensor > 1 and not on_gpu:
        yield (
            "expert_tensor_parallel_size`: together with expert parallelism, it needs gathers of unequal sizes, which gloo "
            "does not support; leave it at 1 on CPUs."
        )


def _engine(megatron: MegatronConfig, on_gpu: bool) -> Iterator[str]:
    if on_gpu:
        return
    if megatron.transformer_impl == "transformer_engine":
        yield "transformer_impl`: Transformer Engine requires GPUs, but these ranks run on CPUs; set it to `auto` or `local`."
    if megatron.moe_grouped_gemm:
        yield "moe_grouped_gemm`: requires Transformer Engine, which needs GPUs, but these ranks run on CPUs; leave it out."
