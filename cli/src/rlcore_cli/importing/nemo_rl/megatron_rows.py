"""The rows of NeMo RL's section `policy.megatron_cfg`."""

from __future__ import annotations

from typing import Any

from rlcore_cli.importing.nemo_rl import facts, policy
from rlcore_cli.importing.rows import (
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
    converted(f"{_OPTIMIZER}.optimizer", policy.megatron_optimizer),
    renamed(f"{_OPTIMIZER}.lr", "policy.optimizer.kwargs.lr"),
    renamed(f"{_OPTIMIZER}.weight_decay", "policy.optimizer.kwargs.weight_decay"),
    converted(f"{_OPTIMIZER}.adam_beta1", policy.betas),
    converted(f"{_OPTIMIZER}.adam_beta2", policy.betas),
    _argument_of("adam", "adam_eps", "eps"),
    _argument_of("sgd", "sgd_momentum", "momentum"),
    clipping(f"{_OPTIMIZER}.clip_grad"),
    converted(f"{_OPTIMIZER}.min_lr", policy.part_of_schedule),
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
    converted("policy.megatron_cfg.scheduler.lr_decay_style", policy.megatron_schedule),
    *(
        converted(f"policy.megatron_cfg.scheduler.{key}", policy.part_of_schedule)
        for key in ("lr_decay_iters", "lr_warmup_iters")
    ),
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
