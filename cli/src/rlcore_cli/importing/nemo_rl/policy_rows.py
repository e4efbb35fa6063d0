"""The rows of NeMo RL's section `policy`."""

from __future__ import annotations

from rlcore_cli.importing.nemo_rl import facts, policy
from rlcore_cli.importing.rows import Row, converted, redundant, redundant_if, renamed, same, unsupported

_PARALLEL = "the backend hf only supports FSDP2: for tensor and context parallelism, enable megatron_cfg"
_MEMORY = "memory is managed differently"
_KERNELS = "kernels are chosen by megatron_cfg.transformer_impl"
_EXPERTS = "no effect on dense models; mixture-of-experts models use Megatron-Core's default"
_OFF = "disabled"

_POLICY: list[Row] = [
    *same("policy", "model_name precision max_total_sequence_length tokenizer.name"),
    Row(pattern="policy.tokenizer.chat_template", decide=policy.chat_template),
    converted("policy.tokenizer.chat_template_kwargs", policy.template_kwargs, whole=True),
    *redundant_if("policy.tokenizer", "use_fastokens", [False], since=_OFF, reason="tokenizers are those of Transformers"),
    converted("policy.train_global_batch_size", policy.global_batch),
    converted("policy.train_micro_batch_size", policy.pairs_as_rows("policy.train_micro_batch_size")),
    *same("policy", "logprob_batch_size"),
    converted("policy.generation_batch_size", policy.rows_decoded),
    converted("policy.logprob_chunk_size", policy.logprob_chunk),
    *redundant_if("policy", "offload_optimizer_for_logprob", [False], since=_OFF, reason=_MEMORY),
    converted("policy.hf_config_overrides", policy.config_overrides, whole=True),
    *same("policy.dynamic_batching", "enabled train_mb_tokens logprob_mb_tokens sequence_length_round"),
    *same("policy.sequence_packing", "enabled train_mb_tokens logprob_mb_tokens"),
    converted("policy.sequence_packing.algorithm", policy.packer),
    *redundant_if(
        "policy.sequence_packing",
        "microbatch_order",
        ["packer"],
        since="same here",
        reason="the order is always that of the packer",
    ),
    *redundant(
        "policy.sequence_packing",
        "sequence_length_round fuse_loss",
        "rows are packed without rounding, and the loss is not fused",
    ),
    *redundant("policy", "make_sequence_length_divisible_by", "each backend pads as its parallelism requires"),
    converted("policy.max_grad_norm", policy.clipping),
    *same("policy.optimizer", "name"),
    converted("policy.optimizer.kwargs", policy.keywords, whole=True),
    *redundant("policy", "optimizer", "not set"),
    converted("policy.scheduler", policy.schedulers, whole=True),
    *unsupported("policy", "draft.**", "draft models are not trained"),
    *redundant_if(
        "policy", "reward_model_cfg.enabled", [True], since="the algorithm has a scalar head", reason="sft has no scalar head"
    ),
    *redundant_if(
        "policy",
        "reward_model_cfg.reward_model_type",
        ["bradley_terry"],
        since="same here",
        reason="rm uses the Bradley-Terry loss",
    ),
    *redundant_if(
        "policy", "activation_checkpointing_enabled", [False], since=_OFF, reason="set dtensor_cfg.activation_checkpointing"
    ),
    *redundant_if("policy", "router_replay.**", [False], since=_OFF, reason="experts are routed again in training"),
]

_DTENSOR: list[Row] = [
    *redundant("policy.dtensor_cfg", "_v2", "there is only one implementation"),
    *same("policy", "activation_checkpointing"),
    renamed("policy.dtensor_cfg.activation_checkpointing", "policy.activation_checkpointing"),
    *redundant_if("policy.dtensor_cfg", "tensor_parallel_size context_parallel_size", [1], since="same here", reason=_PARALLEL),
    *redundant_if("policy.dtensor_cfg", "expert_parallel_size dp_replicate_size", [1], since="same here", reason=_PARALLEL),
    *redundant_if("policy.dtensor_cfg", "sequence_parallel", [False], since=_OFF, reason=_PARALLEL),
    *redundant_if("policy.dtensor_cfg", "cpu_offload", [False], since=_OFF, reason=_MEMORY),
    *redundant_if("policy.dtensor_cfg", "clear_cache_every_n_steps", [], since=_OFF, reason=_MEMORY),
    *redundant_if("policy.dtensor_cfg", "custom_parallel_plan", [], since="none", reason="FSDP2 shards layer by layer"),
    *redundant_if("policy.dtensor_cfg", "automodel_kwargs.**", [], since="none", reason="models are loaded with Transformers"),
    *redundant_if("policy.dtensor_cfg", "env_vars.**", [""], since="none", reason="workers inherit the driver's environment"),
    converted("policy.dtensor_cfg.lora_cfg.enabled", policy.lora),
    renamed("policy.dtensor_cfg.lora_cfg.dim", "policy.hf_cfg.lora.rank"),
    renamed("policy.dtensor_cfg.lora_cfg.alpha", "policy.hf_cfg.lora.alpha"),
    renamed("policy.dtensor_cfg.lora_cfg.dropout", "policy.hf_cfg.lora.dropout"),
    converted("policy.dtensor_cfg.lora_cfg.target_modules", policy.lora_targets),
    converted("policy.dtensor_cfg.lora_cfg.match_all_linear", policy.all_linear),
    converted("policy.dtensor_cfg.lora_cfg.exclude_modules", policy.lora_exclusions),
    converted("policy.dtensor_cfg.lora_cfg.dropout_position", policy.dropout_position),
    *redundant_if(
        "policy.dtensor_cfg.lora_cfg", "lora_A_init", [], since="peft's default", reason="adapters are initialized as in peft"
    ),
    *redundant("policy.dtensor_cfg.lora_cfg", "use_triton", "adapters are implemented by peft"),
]

_MEGATRON: list[Row] = [
    *same("policy.megatron_cfg", "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    *same("policy.megatron_cfg", "expert_model_parallel_size virtual_pipeline_model_parallel_size moe_grouped_gemm"),
    *same("policy.megatron_cfg", "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"),
    converted("policy.megatron_cfg.expert_tensor_parallel_size", policy.expert_tensor_ranks),
    converted("policy.megatron_cfg.sequence_parallel", policy.sequence_ranks),
    converted("policy.megatron_cfg.activation_checkpointing", policy.recomputation),
    converted("policy.megatron_cfg.recompute_granularity", policy.granularity),
    *redundant_if(
        "policy.megatron_cfg", "recompute_modules", [["core_attn"]], since="same here", reason="only attention or whole layers"
    ),
    converted("policy.megatron_cfg.pipeline_dtype", policy.pipeline_type),
    renamed("policy.megatron_cfg.optimizer.use_distributed_optimizer", "policy.megatron_cfg.use_distributed_optimizer"),
    converted("policy.megatron_cfg.optimizer.optimizer", policy.megatron_optimizer),
    renamed("policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr"),
    renamed("policy.megatron_cfg.optimizer.weight_decay", "policy.optimizer.kwargs.weight_decay"),
    converted("policy.megatron_cfg.optimizer.adam_beta1", policy.adam_argument("betas")),
    converted("policy.megatron_cfg.optimizer.adam_beta2", policy.adam_argument("betas")),
    converted("policy.megatron_cfg.optimizer.adam_eps", policy.adam_argument("eps")),
    converted("policy.megatron_cfg.optimizer.sgd_momentum", policy.sgd_momentum),
    converted("policy.megatron_cfg.optimizer.clip_grad", policy.clipping),
    converted("policy.megatron_cfg.optimizer.min_lr", policy.part_of_schedule),
    converted("policy.megatron_cfg.optimizer.bf16", policy.optimizer_type("bfloat16")),
    *redundant_if("policy.megatron_cfg.optimizer", "fp16", [False], since=_OFF, reason="precisions: float32, bfloat16"),
    *redundant_if(
        "policy.megatron_cfg.optimizer",
        "params_dtype",
        ["float32"],
        since="same here",
        reason="the optimizer's weights are float32",
    ),
    *redundant_if(
        "policy.megatron_cfg.optimizer",
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
    converted("policy.megatron_cfg.scheduler.lr_warmup_init", policy.warmup_start),
    *(
        converted(f"policy.megatron_cfg.scheduler.{key}", policy.constant_decay)
        for key in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")
    ),
    renamed(
        "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32", "policy.megatron_cfg.grad_reduce_in_fp32"
    ),
    renamed(
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", "policy.megatron_cfg.overlap_grad_reduce"
    ),
    converted("policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather", policy.gathered_weights),
    *redundant_if(
        "policy.megatron_cfg.distributed_data_parallel_config",
        "use_custom_fsdp",
        [False],
        since=_OFF,
        reason="the distributed optimizer shards the optimizer state; weights are not sharded",
    ),
    *redundant("policy.megatron_cfg.distributed_data_parallel_config", "data_parallel_sharding_strategy", "only for its FSDP"),
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

_GENERATION: list[Row] = [
    converted("policy.generation.backend", policy.engine),
    converted("policy.generation.max_new_tokens", policy.length_of_answers),
    *same("policy.generation", "temperature stop_token_ids stop_strings model_name"),
    converted("policy.generation.top_p", policy.unfiltered("top_p", 1.0)),
    converted("policy.generation.top_k", policy.unfiltered("top_k", None)),
    converted("policy.generation.val_temperature", policy.temperature_of_validation),
    converted("policy.generation.val_top_p", policy.as_in_training("top_p")),
    converted("policy.generation.val_top_k", policy.as_in_training("top_k")),
    *redundant("policy.generation", "port_range_low port_range_high", "free ports are chosen automatically"),
    *redundant_if("policy.generation", "refit_transport", [], since="not set", reason="transports have other names"),
    *redundant("policy.generation", "refit_cfg.** real_quant_export_cpu_offload", "only for unsupported transports"),
    *redundant_if("policy.generation", "bad_words", [], since="none", reason="tokens cannot be forbidden"),
    *redundant_if("policy.generation", "use_async_rollouts", [False], since=_OFF, reason="all rows take their turns together"),
    *redundant_if(
        "policy.generation", "colocated.enabled", [True], since="policy and engine are colocated", reason=facts.COLOCATED
    ),
    *unsupported("policy.generation", "colocated.resources.**", facts.COLOCATED),
    *unsupported("policy.generation", "mcore_generation_config.**", "Megatron is not available as a generation backend"),
    *same("policy.generation.vllm_cfg", "async_engine kv_cache_dtype tensor_parallel_size pipeline_parallel_size"),
    *same("policy.generation.vllm_cfg", "enable_prefix_caching max_num_seqs max_num_batched_tokens"),
    *same("policy.generation.vllm_cfg", "gpu_memory_utilization max_model_len enforce_eager load_format"),
    converted("policy.generation.vllm_cfg.precision", policy.engine_precision),
    *redundant_if(
        "policy.generation.vllm_cfg", "expert_parallel_size", [1], since="same here", reason="vLLM does not shard experts"
    ),
    *redundant_if(
        "policy.generation.vllm_cfg", "use_deep_gemm expose_http_server", [False], since=_OFF, reason="no equivalent key"
    ),
    *redundant_if(
        "policy.generation.vllm_cfg", "skip_tokenizer_init", [True], since="same here", reason="only token ids are exchanged"
    ),
    *redundant_if(
        "policy.generation.vllm_cfg",
        "num_last_layers_in_bf16 num_first_layers_in_bf16",
        [0],
        since="none",
        reason="all layers have the engine's precision",
    ),
    *redundant_if(
        "policy.generation.vllm_cfg",
        "logprobs_mode",
        ["processed_logprobs"],
        since="same here",
        reason="log-probabilities are those of the sampling distribution",
    ),
    *redundant(
        "policy.generation.vllm_cfg", "use_tqdm enable_vllm_metrics_logger vllm_metrics_logger_interval", "not displayed"
    ),
    *redundant_if(
        "policy.generation.vllm_cfg",
        "http_refit_api_key_env_var http_refit_server_port zmq_refit_server_port reset_encoder_cache_after_weight_update",
        [False],
        since=_OFF,
        reason="weights are sent through shared memory, a collective or disk",
    ),
    *(
        renamed(f"policy.generation.vllm_kwargs.{key}", f"policy.generation.vllm_cfg.{key}")
        for key in ("max_num_seqs", "max_num_batched_tokens")
    ),
    converted("policy.generation.vllm_kwargs.kv_cache_memory_bytes", policy.cache_size),
    *redundant("policy.generation.vllm_kwargs", "enable_chunked_prefill", "depends on the device"),
    converted("policy.generation.vllm_kwargs", policy.engine_arguments, whole=True),
]

POLICY: list[Row] = [*_POLICY, *_DTENSOR, *_MEGATRON, *_GENERATION]
"""Rows are checked in this order."""
