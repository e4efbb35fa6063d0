"""Conversions of NeMo RL's section `policy`: batches, parallelism, optimizer, schedule, sampling.

The rows of NeMo RL's section `policy.megatron_cfg`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore_cli.importing.nemo_rl import facts
from rlcore_cli.importing.nemo_rl.facts import algorithm_of, has_pairs, is_megatron
from rlcore_cli.importing.rows import (
    Decision,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Unsupported,
    cases,
    converted,
    kept,
    one_of,
    redundant,
    redundant_if,
    renamed,
    same,
    unsupported,
)

_SCHEDULERS = "torch.optim.lr_scheduler"


def pairs_as_rows(key: str) -> Callable[[Any, ForeignConfig], Decision]:
    """Return the conversion of a number of pairs to rows; algorithms without pairs keep the number."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        if not has_pairs(foreign):
            return Mapped({key: value})
        if not isinstance(value, int):
            return Unsupported("must be a whole number of pairs")
        return Mapped({key: 2 * value}, "counts rows, two per pair")

    return decide


def global_batch(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the rows or pairs of an optimizer step; algorithms that do not sample take one of those per step."""
    algorithm = algorithm_of(foreign)
    if algorithm in ("sft", "dpo", "rm"):
        return Mapped({f"{algorithm}.global_batch_size": value})
    return Mapped({"policy.train_global_batch_size": value})


def length_of_answers(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum completion length. In NeMo RL it may equal the total length, which includes the prompt."""
    longest = foreign.number("policy.max_total_sequence_length", 0)
    if isinstance(value, int) and longest and value >= longest:
        return Mapped({"policy.generation.max_new_tokens": longest - 1}, "one token is reserved for the prompt")
    return Mapped({"policy.generation.max_new_tokens": value})


def engine(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the generation backend."""
    if value in ("vllm", "hf"):
        return Mapped({"policy.generation.backend": value})
    return Unsupported(f"no generation backend {value!r}: choose another `policy.generation.backend`")


ELSEWHERE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "enable_chunked_prefill")
"""vLLM arguments that have a config key, or no equivalent."""


def engine_arguments(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the arguments passed to vLLM."""
    if not isinstance(value, Mapping) or not value:
        return Redundant("none")
    return Mapped({"policy.generation.vllm_kwargs": {key: it for key, it in value.items() if key not in ELSEWHERE}})


def cache_size(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the size of the KV cache."""
    if not isinstance(value, int):
        return Unsupported("must be a whole number of bytes")
    return Mapped({"policy.generation.vllm_cfg.kv_cache_gib": value / 2**30}, "in GiB")


def logprob_chunk(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the number of positions whose logits are computed at once."""
    if value is None:
        return Redundant("logits are always computed in chunks")
    return Mapped({f"policy.{_section(foreign)}.logprob_chunk_tokens": value})


def megatron_optimizer(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert Megatron's optimizer to the PyTorch class with the same algorithm."""
    names = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
    if str(value) in names:
        return Mapped({"policy.optimizer.name": names[str(value)]})
    return Unsupported(f"optimizers of the megatron backend: {', '.join(names)}")


def betas(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the betas of Adam, which are two keys of Megatron's optimizer, if Adam is used."""
    at = "policy.megatron_cfg.optimizer"
    if foreign.get(f"{at}.optimizer", "adam") != "adam":
        return Redundant("another optimizer is used")
    pair = [foreign.get(f"{at}.adam_beta1", 0.9), foreign.get(f"{at}.adam_beta2", 0.999)]
    return Mapped({"policy.optimizer.kwargs.betas": pair})


def megatron_schedule(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert Megatron's schedule: warm-up, then constant, linear or cosine."""
    at = "policy.megatron_cfg.scheduler"
    warmup, length = foreign.number(f"{at}.lr_warmup_iters", 0), foreign.number(f"{at}.lr_decay_iters", 0)
    highest, lowest = (foreign.get(f"policy.megatron_cfg.optimizer.{key}", 0.0) for key in ("lr", "min_lr"))
    kwargs: dict[str, Any] = {"num_warmup_steps": warmup}
    are_rates = all(isinstance(rate, int | float) for rate in (highest, lowest))
    if value in ("linear", "cosine") and not (length and are_rates and highest > 0):
        return Unsupported("needs lr_decay_iters and the optimizer's lr, to determine the slope")
    if value == "linear" and lowest:
        return Unsupported("`linear` decays to 0, but min_lr is not 0: use `cosine`, or any scheduler by its import path")
    if value == "cosine":
        kwargs |= {"num_training_steps": length, "min_lr_ratio": lowest / highest}
    elif value == "linear":
        kwargs |= {"num_training_steps": length}
    elif value != "constant":
        return Unsupported("schedules: constant, linear, cosine, or any scheduler by its import path")
    native = {"policy.scheduler.name": value, **{f"policy.scheduler.kwargs.{name}": it for name, it in kwargs.items()}}
    return Mapped(native, "the warm-up starts at lr / (num_warmup_steps + 1)" if warmup else "")


def part_of_schedule(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert a key that is converted together with `lr_decay_style`."""
    style = foreign.get("policy.megatron_cfg.scheduler.lr_decay_style", "constant")
    schedule = megatron_schedule(style, foreign)
    return Mapped(schedule.values, "part of the schedule") if isinstance(schedule, Mapped) else schedule


def schedulers(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert a list of PyTorch schedulers. Only the first is supported, so the later ones must keep the rate constant."""
    listed = value if isinstance(value, list) else [value]
    stages = [one for one in listed if isinstance(one, Mapping) and "name" in one]
    milestones: Any = next((one["milestones"] for one in listed if isinstance(one, Mapping) and "milestones" in one), [])
    moving = [one for one in stages if not _is_constant_one(one)]
    if not moving and stages:
        return Redundant("the learning rate is constant by default")
    first = stages[0] if stages else {}
    arguments = first.get("kwargs") or {}
    ends_at_one = first.get("name") == f"{_SCHEDULERS}.LinearLR" and arguments.get("end_factor", 1.0) == 1.0
    warms_up = ends_at_one and milestones == [arguments.get("total_iters")]
    if moving == stages[:1] and stages and (len(stages) == 1 or warms_up):
        note = "later schedulers keep the rate constant" if len(stages) > 1 else ""
        return Mapped({"policy.scheduler.name": first["name"], "policy.scheduler.kwargs": dict(arguments)}, note)
    return Unsupported(
        "only one scheduler is supported: `linear` or `cosine` with num_warmup_steps, or a factory by its import path"
    )


def _is_constant_one(stage: Mapping[str, Any]) -> bool:
    return stage["name"] == f"{_SCHEDULERS}.ConstantLR" and (stage.get("kwargs") or {}).get("factor") == 1.0


def _section(foreign: ForeignConfig) -> str:
    return "megatron_cfg" if is_megatron(foreign) else "hf_cfg"


_OPTIMIZER = "policy.megatron_cfg.optimizer"
_DDP = "policy.megatron_cfg.distributed_data_parallel_config"
_MEMORY = "memory is managed differently"
_KERNELS = "kernels are chosen by megatron_cfg.transformer_impl"
_EXPERTS = "no effect on dense models; mixture-of-experts models use Megatron-Core's default"
_OFF = "disabled"

_SELECTIVE = Mapped({"policy.megatron_cfg.recompute_granularity": "selective"})


def _is_selective(foreign: ForeignConfig) -> bool:
    return bool(foreign.get("policy.megatron_cfg.recompute_granularity") == "selective")


def _shards_and_overlaps(foreign: ForeignConfig) -> bool:
    """Whether Megatron uses its distributed optimizer and overlaps the gradient reduction."""
    return all(foreign.get(key) is True for key in (f"{_OPTIMIZER}.use_distributed_optimizer", f"{_DDP}.overlap_grad_reduce"))


def _megatron_clips_otherwise(value: Any, foreign: ForeignConfig) -> bool:
    own = foreign.get(f"{_OPTIMIZER}.clip_grad") if facts.is_megatron(foreign) else None
    return own is not None and own != value


def _argument_of(optimizer: str, key: str, native: str) -> Row:
    """An argument of one of Megatron's optimizers."""
    return kept(
        f"{_OPTIMIZER}.{key}",
        (
            lambda _, foreign: foreign.get(f"{_OPTIMIZER}.optimizer", "adam") != optimizer,
            Redundant("another optimizer is used"),
        ),
        to=f"policy.optimizer.kwargs.{native}",
    )


def clipping(pattern: str) -> Row:
    """The maximum gradient norm, for which Megatron's optimizer has its own key; 0 disables clipping."""
    return kept(
        pattern,
        (_megatron_clips_otherwise, Redundant("megatron_cfg.optimizer.clip_grad takes precedence")),
        (one_of(0), Mapped({"policy.max_grad_norm": None})),
        to="policy.max_grad_norm",
    )


MEGATRON: list[Row] = [
    *same("policy.megatron_cfg", "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    *same("policy.megatron_cfg", "expert_model_parallel_size virtual_pipeline_model_parallel_size moe_grouped_gemm"),
    *same("policy.megatron_cfg", "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"),
    kept(
        "policy.megatron_cfg.expert_tensor_parallel_size",
        (
            lambda _, foreign: foreign.number("policy.megatron_cfg.expert_model_parallel_size", 1) == 1,
            Redundant("without expert parallelism, experts use the tensor parallelism of all other layers"),
        ),
    ),
    kept(
        "policy.megatron_cfg.sequence_parallel",
        (
            lambda on, foreign: on is True and foreign.number("policy.megatron_cfg.tensor_model_parallel_size", 1) == 1,
            Redundant("no effect without tensor parallelism"),
        ),
    ),
    kept(
        "policy.megatron_cfg.activation_checkpointing",
        (lambda on, foreign: on is True and _is_selective(foreign), _SELECTIVE),
        to="policy.activation_checkpointing",
    ),
    cases(
        "policy.megatron_cfg.recompute_granularity",
        (
            lambda _, foreign: foreign.get("policy.megatron_cfg.activation_checkpointing") is not True,
            Redundant("activation_checkpointing is disabled"),
        ),
        (lambda _, foreign: _is_selective(foreign), _SELECTIVE),
        otherwise=Mapped({"policy.activation_checkpointing": True}),
    ),
    *redundant_if(
        "policy.megatron_cfg", "recompute_modules", [["core_attn"]], since="same here", reason="only attention or whole layers"
    ),
    cases(
        "policy.megatron_cfg.pipeline_dtype",
        (
            lambda value, foreign: value == foreign.get("policy.precision"),
            Redundant("pipeline stages exchange tensors in policy.precision"),
        ),
        otherwise=Unsupported("pipeline stages exchange tensors in policy.precision"),
    ),
    renamed(f"{_OPTIMIZER}.use_distributed_optimizer", "policy.megatron_cfg.use_distributed_optimizer"),
    converted(f"{_OPTIMIZER}.optimizer", megatron_optimizer),
    renamed(f"{_OPTIMIZER}.lr", "policy.optimizer.kwargs.lr"),
    renamed(f"{_OPTIMIZER}.weight_decay", "policy.optimizer.kwargs.weight_decay"),
    converted(f"{_OPTIMIZER}.adam_beta1", betas),
    converted(f"{_OPTIMIZER}.adam_beta2", betas),
    _argument_of("adam", "adam_eps", "eps"),
    _argument_of("sgd", "sgd_momentum", "momentum"),
    clipping(f"{_OPTIMIZER}.clip_grad"),
    converted(f"{_OPTIMIZER}.min_lr", part_of_schedule),
    cases(
        f"{_OPTIMIZER}.bf16",
        (
            lambda value, foreign: value is (foreign.get("policy.precision") == "bfloat16"),
            Redundant("policy.precision sets it"),
        ),
        otherwise=Unsupported("contradicts policy.precision, which sets it"),
    ),
    *redundant_if(_OPTIMIZER, "fp16", [False], since=_OFF, reason="precisions: float32, bfloat16"),
    *redundant_if(
        _OPTIMIZER,
        "params_dtype",
        ["float32"],
        since="same here",
        reason="the optimizer's weights are float32",
    ),
    *redundant_if(
        _OPTIMIZER,
        "use_precision_aware_optimizer optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d optimizer_offload_fraction",
        [False, 0.0],
        since=_OFF,
        reason="the optimizer state is float32 and on the device",
    ),
    converted("policy.megatron_cfg.scheduler.lr_decay_style", megatron_schedule),
    *(converted(f"policy.megatron_cfg.scheduler.{key}", part_of_schedule) for key in ("lr_decay_iters", "lr_warmup_iters")),
    cases(
        "policy.megatron_cfg.scheduler.lr_warmup_init",
        (lambda _, foreign: not foreign.number("policy.megatron_cfg.scheduler.lr_warmup_iters", 0), Redundant("no warm-up")),
        otherwise=Unsupported("warm-ups start at lr / (num_warmup_steps + 1)"),
    ),
    *(
        cases(
            f"policy.megatron_cfg.scheduler.{key}",
            (
                lambda value, foreign: value in ("constant", foreign.get(f"{_OPTIMIZER}.weight_decay")),
                Redundant("weight decay is constant"),
            ),
            otherwise=Unsupported("weight decay is constant"),
        )
        for key in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")
    ),
    renamed(f"{_DDP}.grad_reduce_in_fp32", "policy.megatron_cfg.grad_reduce_in_fp32"),
    renamed(f"{_DDP}.overlap_grad_reduce", "policy.megatron_cfg.overlap_grad_reduce"),
    kept(
        f"{_DDP}.overlap_param_gather",
        (
            lambda on, foreign: on is True and not _shards_and_overlaps(foreign),
            Redundant("no effect without use_distributed_optimizer and overlap_grad_reduce"),
        ),
        to="policy.megatron_cfg.overlap_param_gather",
    ),
    *redundant_if(
        _DDP,
        "use_custom_fsdp",
        [False],
        since=_OFF,
        reason="the distributed optimizer shards the optimizer state; weights are not sharded",
    ),
    *redundant(_DDP, "data_parallel_sharding_strategy", "only for its FSDP"),
    *redundant(
        "policy.megatron_cfg", "use_fused_linear_logprobs defer_fp32_logits", "logits are computed in chunks, in float32"
    ),
    renamed("policy.megatron_cfg.fused_linear_logprobs_chunk_size", "policy.megatron_cfg.logprob_chunk_tokens"),
    *redundant("policy.megatron_cfg", "apply_rope_fusion bias_activation_fusion moe_permute_fusion", _KERNELS),
    *redundant("policy.megatron_cfg", "gradient_accumulation_fusion use_fused_weighted_squared_relu", _KERNELS),
    *redundant("policy.megatron_cfg", "force_reconvert_from_hf converter_type", "Hugging Face files are read directly"),
    *redundant("policy.megatron_cfg", "empty_unused_memory_level checkpoint.ckpt_assume_constant_structure", _MEMORY),
    *redundant("policy.megatron_cfg", "use_gloo_process_groups moe_per_layer_logging", "no effect"),
    *redundant_if(
        "policy.megatron_cfg", "checkpoint.async_save", [False], since=_OFF, reason="checkpoints are saved synchronously"
    ),
    *redundant_if("policy.megatron_cfg", "cuda_graph_impl", ["none"], since="none", reason="training uses no CUDA graphs"),
    *redundant("policy.megatron_cfg", "cuda_graph_modules cuda_graph_warmup_steps", "training uses no CUDA graphs"),
    *redundant_if("policy.megatron_cfg", "fine_grained_activation_offloading", [False], since=_OFF, reason=_MEMORY),
    *redundant_if("policy.megatron_cfg", "offload_modules", [], since=_OFF, reason=_MEMORY),
    *redundant_if(
        "policy.megatron_cfg", "mtp_num_layers mtp_loss_scaling_factor", [0], since=_OFF, reason="MTP heads are not supported"
    ),
    *redundant_if("policy.megatron_cfg", "mtp_use_repeated_layer mtp_detach_heads", [False], since=_OFF, reason="no MTP"),
    *redundant_if("policy.megatron_cfg", "model_overrides.** env_vars.**", [], since="none", reason="no equivalent key"),
    *redundant_if("policy.megatron_cfg", "freeze_moe_router", [False], since="same here", reason=_EXPERTS),
    *redundant_if("policy.megatron_cfg", "moe_enable_deepep moe_shared_expert_overlap", [False], since=_OFF, reason=_EXPERTS),
    *redundant_if("policy.megatron_cfg", "moe_token_dispatcher_type", ["alltoall"], since="same here", reason=_EXPERTS),
    *redundant_if("policy.megatron_cfg", "moe_router_load_balancing_type", ["none"], since="same here", reason=_EXPERTS),
    *redundant_if("policy.megatron_cfg", "moe_router_dtype moe_router_bias_update_rate", [0.0], since=_OFF, reason=_EXPERTS),
    *unsupported("policy.megatron_cfg", "fp8_cfg.**", "training is in float32 or bfloat16"),
    *unsupported("policy.megatron_cfg", "peft.**", "only the backend hf supports LoRA"),
]
