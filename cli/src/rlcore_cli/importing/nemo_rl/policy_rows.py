"""The rows of NeMo RL's section `policy`.

Rows for a section that describes another model the way `policy` does: `value` (the critic) and `teacher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore_cli.importing.nemo_rl import facts, policy
from rlcore_cli.importing.nemo_rl.policy import MEGATRON, clipping
from rlcore_cli.importing.rows import (
    Decision,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Switch,
    Unsupported,
    cases,
    converted,
    is_empty,
    is_null,
    is_true,
    kept,
    one_of,
    other_than,
    redundant,
    redundant_if,
    renamed,
    same,
    unsupported,
)

_CONTENT_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_PACKERS = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")
_LORA = "policy.dtensor_cfg.lora_cfg"
_TEMPERATURE = "policy.generation.temperature"

_PARALLEL = "the backend hf only supports FSDP2: for tensor and context parallelism, enable megatron_cfg"
_MEMORY = "memory is managed differently"
_OFF = "disabled"

_POLICY: list[Row] = [
    *same("policy", "model_name precision max_total_sequence_length tokenizer.name"),
    kept(
        "policy.tokenizer.chat_template",
        (one_of("default"), Redundant("the tokenizer's template is the default")),
        (
            is_null,
            Mapped(
                {"policy.tokenizer.chat_template": _CONTENT_ONLY},
                "null means no template in NeMo RL: message contents are concatenated. Here null is the tokenizer's template",
            ),
        ),
    ),
    kept("policy.tokenizer.chat_template_kwargs", (is_empty, Redundant("none")), whole=True),
    *redundant_if("policy.tokenizer", "use_fastokens", [False], since=_OFF, reason="tokenizers are those of Transformers"),
    converted("policy.train_global_batch_size", policy.global_batch),
    converted("policy.train_micro_batch_size", policy.pairs_as_rows("policy.train_micro_batch_size")),
    *same("policy", "logprob_batch_size"),
    kept(
        "policy.generation_batch_size",
        (
            lambda _, foreign: foreign.get("policy.generation.backend") != "hf",
            Redundant("the engine batches automatically"),
        ),
        to="policy.generation.hf_cfg.max_batch_rows",
    ),
    converted("policy.logprob_chunk_size", policy.logprob_chunk),
    *redundant_if("policy", "offload_optimizer_for_logprob", [False], since=_OFF, reason=_MEMORY),
    kept(
        "policy.hf_config_overrides",
        (is_empty, Redundant("none")),
        (
            lambda _, foreign: facts.is_megatron(foreign),
            Unsupported("the megatron backend uses the model config unchanged"),
        ),
        to="policy.hf_cfg.config_overrides",
        whole=True,
    ),
    *same("policy.dynamic_batching", "enabled train_mb_tokens logprob_mb_tokens sequence_length_round"),
    *same("policy.sequence_packing", "enabled train_mb_tokens logprob_mb_tokens"),
    kept("policy.sequence_packing.algorithm", (other_than(*_PACKERS), Unsupported(f"algorithms: {', '.join(_PACKERS)}"))),
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
    clipping("policy.max_grad_norm"),
    *same("policy.optimizer", "name"),
    kept("policy.optimizer.kwargs", whole=True),
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
    cases(f"{_LORA}.enabled", otherwise=Mapped({"policy.hf_cfg.lora": {}}, "the section enables LoRA")),
    renamed(f"{_LORA}.dim", "policy.hf_cfg.lora.rank"),
    renamed(f"{_LORA}.alpha", "policy.hf_cfg.lora.alpha"),
    renamed(f"{_LORA}.dropout", "policy.hf_cfg.lora.dropout"),
    kept(
        f"{_LORA}.target_modules",
        (
            lambda value, foreign: not value or foreign.get(f"{_LORA}.match_all_linear") is True,
            Redundant("match_all_linear takes precedence"),
        ),
        to="policy.hf_cfg.lora.target_modules",
    ),
    cases(
        f"{_LORA}.match_all_linear",
        (is_true, Mapped({"policy.hf_cfg.lora.target_modules": "all-linear"}, "all but the LM head")),
        otherwise=Redundant("target_modules is used"),
    ),
    kept(f"{_LORA}.exclude_modules", (is_empty, Redundant("none")), to="policy.hf_cfg.lora.exclude_modules"),
    cases(
        f"{_LORA}.dropout_position",
        (
            lambda value, foreign: value == "pre" or not foreign.get(f"{_LORA}.dropout"),
            Redundant("there is no dropout, or it applies to the adapter's input"),
        ),
        otherwise=Unsupported("dropout applies to the adapter's input, as in peft"),
    ),
    *redundant_if(_LORA, "lora_A_init", [], since="peft's default", reason="adapters are initialized as in peft"),
    *redundant(_LORA, "use_triton", "adapters are implemented by peft"),
]


def _as_in_training(key: str) -> Row:
    """`top_p` or `top_k` of validation, which must equal that of training."""
    return cases(
        f"policy.generation.val_{key}",
        (
            lambda value, foreign: value == foreign.get(f"policy.generation.{key}", value),
            Redundant("validation uses the filter of training"),
        ),
        otherwise=Unsupported("validation uses the filter of training; only the temperature can differ"),
    )


_GENERATION: list[Row] = [
    converted("policy.generation.backend", policy.engine),
    converted("policy.generation.max_new_tokens", policy.length_of_answers),
    *same("policy.generation", "temperature stop_token_ids stop_strings model_name"),
    *(
        cases(
            f"policy.generation.{key}",
            (one_of(None, neutral), Mapped({f"policy.generation.{key}": neutral})),
            otherwise=Unsupported(
                "tokens would be sampled from the filtered distribution but scored under the full one, which grpo does not "
                "allow"
            ),
        )
        for key, neutral in (("top_p", 1.0), ("top_k", None))
    ),
    kept(
        "policy.generation.val_temperature",
        (
            lambda value, foreign: value not in (0, foreign.get(_TEMPERATURE, 1.0)),
            Unsupported("validation can only use the training temperature or 0"),
        ),
    ),
    _as_in_training("top_p"),
    _as_in_training("top_k"),
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
    kept(
        "policy.generation.vllm_cfg.precision",
        (
            other_than("float32", "bfloat16", "float16"),
            Unsupported("the engine uses the policy's precision; set quantization in vllm_kwargs.quantization"),
        ),
    ),
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

POLICY: list[Row] = [*_POLICY, *_DTENSOR, *MEGATRON, *_GENERATION]
"""Rows are checked in this order."""


def rows_for(section: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of `policy` for another section; those of `policy.generation` are left out, because only the policy samples."""
    return [_row(section, row) for row in rows if not row.pattern.startswith("policy.generation")]


def switches_for(section: str, switches: Sequence[Switch]) -> list[Switch]:
    """The switches of `policy` for another section."""
    selected = [switch for switch in switches if switch.pattern.startswith("policy.") and ".generation" not in switch.pattern]
    return [_switch(section, switch) for switch in selected]


def _row(section: str, row: Row) -> Row:
    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        decision = row.decide(value, _as_policy(section, foreign))
        if not isinstance(decision, Mapped):
            return decision
        return Mapped({_renamed(section, key): it for key, it in decision.values.items()}, decision.note)

    return Row(pattern=_renamed(section, row.pattern), decide=decide, whole=row.whole, verbatim=row.verbatim)


def _switch(section: str, switch: Switch) -> Switch:
    return Switch(
        pattern=_renamed(section, switch.pattern),
        is_on=lambda foreign: switch.is_on(_as_policy(section, foreign)),
        off=_renamed(section, switch.off),
    )


def _as_policy(section: str, foreign: ForeignConfig) -> ForeignConfig:
    return ForeignConfig({**foreign.values, "policy": foreign.values.get(section)})


def _renamed(section: str, key: str) -> str:
    return f"{section}.{key.removeprefix('policy.')}" if key.startswith("policy.") else key
