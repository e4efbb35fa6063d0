"""Conversions of NeMo RL's section `policy`: batches, parallelism, optimizer, schedule, sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore_cli.importing.nemo_rl.facts import algorithm_of, has_pairs, is_megatron
from rlcore_cli.importing.rows import Decision, ForeignConfig, Mapped, Redundant, Unsupported

_SCHEDULERS = "torch.optim.lr_scheduler"


_CONTENT_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def chat_template(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the chat template. In NeMo RL, `default` is that of the tokenizer and null means no template."""
    if value == "default":
        return Redundant("the tokenizer's template is the default")
    if value is None:
        return Mapped(
            {"policy.tokenizer.chat_template": _CONTENT_ONLY},
            "null means no template in NeMo RL: message contents are concatenated. Here null is the tokenizer's template",
        )
    return Mapped({"policy.tokenizer.chat_template": value})


def template_kwargs(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the variables of the chat template."""
    if not value:
        return Redundant("none")
    return Mapped({"policy.tokenizer.chat_template_kwargs": value})


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


def temperature_of_validation(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the validation temperature, which must be 0 or that of training."""
    if value in (0, foreign.get("policy.generation.temperature", 1.0)):
        return Mapped({"policy.generation.val_temperature": value})
    return Unsupported("validation can only use the training temperature or 0")


def as_in_training(key: str) -> Callable[[Any, ForeignConfig], Decision]:
    """Return the conversion of `top_p` or `top_k` of validation, which must equal that of training."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        if value == foreign.get(f"policy.generation.{key}", value):
            return Redundant("validation uses the filter of training")
        return Unsupported("validation uses the filter of training; only the temperature can differ")

    return decide


def unfiltered(key: str, neutral: Any) -> Callable[[Any, ForeignConfig], Decision]:
    """Convert a sampling filter, which must be disabled for training."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        if value is None or value == neutral:
            return Mapped({f"policy.generation.{key}": neutral})
        return Unsupported(
            "tokens would be sampled from the filtered distribution but scored under the full one, which grpo does not allow"
        )

    return decide


def engine(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the generation backend."""
    if value in ("vllm", "hf"):
        return Mapped({"policy.generation.backend": value})
    return Unsupported(f"no generation backend {value!r}: choose another `policy.generation.backend`")


def engine_precision(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the data type of the engine's weights."""
    if value in ("float32", "bfloat16", "float16"):
        return Mapped({"policy.generation.vllm_cfg.precision": value})
    return Unsupported("the engine uses the policy's precision; set quantization in vllm_kwargs.quantization")


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


def rows_decoded(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum number of rows decoded together, which only the `hf` generation backend uses."""
    if foreign.get("policy.generation.backend") == "hf":
        return Mapped({"policy.generation.hf_cfg.max_batch_rows": value})
    return Redundant("the engine batches automatically")


def logprob_chunk(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the number of positions whose logits are computed at once."""
    if value is None:
        return Redundant("logits are always computed in chunks")
    return Mapped({f"policy.{_section(foreign)}.logprob_chunk_tokens": value})


def config_overrides(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the fields of the model config."""
    if not value:
        return Redundant("none")
    if is_megatron(foreign):
        return Unsupported("the megatron backend uses the model config unchanged")
    return Mapped({"policy.hf_cfg.config_overrides": value})


def keywords(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the keyword arguments of the optimizer."""
    return Mapped({"policy.optimizer.kwargs": value})


def packer(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the bin-packing algorithm for microbatches."""
    known = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")
    if value in known:
        return Mapped({"policy.sequence_packing.algorithm": value})
    return Unsupported(f"algorithms: {', '.join(known)}")


def lora(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the section `lora`, which enables LoRA by its presence."""
    return Mapped({"policy.hf_cfg.lora": {}}, "the section enables LoRA")


def lora_targets(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the names of layers with adapters."""
    if not value or foreign.get("policy.dtensor_cfg.lora_cfg.match_all_linear") is True:
        return Redundant("match_all_linear takes precedence")
    return Mapped({"policy.hf_cfg.lora.target_modules": value})


def all_linear(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the switch that gives adapters to all linear layers."""
    if value is True:
        return Mapped({"policy.hf_cfg.lora.target_modules": "all-linear"}, "all but the LM head")
    return Redundant("target_modules is used")


def dropout_position(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the position of LoRA dropout: the input or the output of an adapter."""
    if value == "pre" or not foreign.get("policy.dtensor_cfg.lora_cfg.dropout"):
        return Redundant("there is no dropout, or it applies to the adapter's input")
    return Unsupported("dropout applies to the adapter's input, as in peft")


def lora_exclusions(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the names of layers without adapters."""
    return Mapped({"policy.hf_cfg.lora.exclude_modules": value}) if value else Redundant("none")


def expert_tensor_ranks(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the tensor parallelism of experts, which has an effect only with expert parallelism."""
    if foreign.number("policy.megatron_cfg.expert_model_parallel_size", 1) == 1:
        return Redundant("without expert parallelism, experts use the tensor parallelism of all other layers")
    return Mapped({"policy.megatron_cfg.expert_tensor_parallel_size": value})


def sequence_ranks(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert sequence parallelism, which needs tensor parallelism."""
    if value is True and foreign.number("policy.megatron_cfg.tensor_model_parallel_size", 1) == 1:
        return Redundant("no effect without tensor parallelism")
    return Mapped({"policy.megatron_cfg.sequence_parallel": value})


def recomputation(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert Megatron's activation checkpointing, of whole layers or only of attention."""
    if value is not True:
        return Mapped({"policy.activation_checkpointing": value})
    if foreign.get("policy.megatron_cfg.recompute_granularity", "full") == "selective":
        return Mapped({"policy.megatron_cfg.recompute_granularity": "selective"})
    return Mapped({"policy.activation_checkpointing": True})


def granularity(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert which activations are recomputed if activation checkpointing is enabled."""
    if foreign.get("policy.megatron_cfg.activation_checkpointing") is not True:
        return Redundant("activation_checkpointing is disabled")
    return recomputation(True, foreign)


def pipeline_type(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the data type of the activations sent between pipeline stages."""
    if value == foreign.get("policy.precision"):
        return Redundant("pipeline stages exchange tensors in policy.precision")
    return Unsupported("pipeline stages exchange tensors in policy.precision")


def optimizer_type(name: str) -> Callable[[Any, ForeignConfig], Decision]:
    """Return the conversion of a data type of the optimizer, which must agree with `policy.precision`."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        if value is (foreign.get("policy.precision") == name):
            return Redundant("policy.precision sets it")
        return Unsupported("contradicts policy.precision, which sets it")

    return decide


def gathered_weights(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert overlapped parameter gathering, which needs the distributed optimizer."""
    divided = foreign.get("policy.megatron_cfg.optimizer.use_distributed_optimizer") is True
    overlapped = foreign.get("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce") is True
    if value is True and not (divided and overlapped):
        return Redundant("no effect without use_distributed_optimizer and overlap_grad_reduce")
    return Mapped({"policy.megatron_cfg.overlap_param_gather": value})


def megatron_optimizer(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert Megatron's optimizer to the PyTorch class with the same algorithm."""
    names = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
    if str(value) in names:
        return Mapped({"policy.optimizer.name": names[str(value)]})
    return Unsupported(f"optimizers of the megatron backend: {', '.join(names)}")


def adam_argument(name: str) -> Callable[[Any, ForeignConfig], Decision]:
    """Return the conversion of an argument of Adam, if Adam is used."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        at = "policy.megatron_cfg.optimizer"
        if foreign.get(f"{at}.optimizer", "adam") != "adam":
            return Redundant("another optimizer is used")
        if name == "betas":
            value = [foreign.get(f"{at}.adam_beta1", 0.9), foreign.get(f"{at}.adam_beta2", 0.999)]
        return Mapped({f"policy.optimizer.kwargs.{name}": value})

    return decide


def sgd_momentum(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the momentum of SGD, if SGD is used."""
    if foreign.get("policy.megatron_cfg.optimizer.optimizer", "adam") != "sgd":
        return Redundant("another optimizer is used")
    return Mapped({"policy.optimizer.kwargs.momentum": value})


def clipping(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum gradient norm, for which Megatron's optimizer has its own key; 0 disables clipping."""
    own = foreign.get("policy.megatron_cfg.optimizer.clip_grad") if is_megatron(foreign) else None
    if own is not None and own != value:
        return Redundant("megatron_cfg.optimizer.clip_grad takes precedence")
    return Mapped({"policy.max_grad_norm": None if value == 0 else value})


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


def warmup_start(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the initial learning rate of the warm-up."""
    if not foreign.number("policy.megatron_cfg.scheduler.lr_warmup_iters", 0):
        return Redundant("no warm-up")
    return Unsupported("warm-ups start at lr / (num_warmup_steps + 1)")


def constant_decay(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert a weight-decay schedule, which is unsupported."""
    if value in ("constant", foreign.get("policy.megatron_cfg.optimizer.weight_decay")):
        return Redundant("weight decay is constant")
    return Unsupported("weight decay is constant")


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
