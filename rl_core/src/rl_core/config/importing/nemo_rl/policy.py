"""How values of NeMo RL's section `policy` become ours: batches, parallelism, optimizer, schedule, sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_core.config.importing.nemo_rl.facts import algorithm_of, has_pairs, is_megatron
from rl_core.config.importing.rows import Becomes, Decision, Refused, Theirs, Unneeded

_SCHEDULERS = "torch.optim.lr_scheduler"


_CONTENT_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def chat_template(value: Any, theirs: Theirs) -> Decision:
    """The chat template: `default` is the tokenizer's own, and null is none at all."""
    if value == "default":
        return Unneeded("the tokenizer's own template is the default")
    if value is None:
        return Becomes(
            {"policy.tokenizer.chat_template": _CONTENT_ALONE},
            "null means no template in NeMo RL: the contents of messages are concatenated. Null here is the tokenizer's own",
        )
    return Becomes({"policy.tokenizer.chat_template": value})


def template_kwargs(value: Any, theirs: Theirs) -> Decision:
    """Variables of the chat template; null is none."""
    if not value:
        return Unneeded("there are none")
    return Becomes({"policy.tokenizer.chat_template_kwargs": value})


def pairs_as_rows(key: str) -> Callable[[Any, Theirs], Decision]:
    """A number of pairs, where ours counts rows; the same number for algorithms without pairs."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if not has_pairs(theirs):
            return Becomes({key: value})
        if not isinstance(value, int):
            return Refused("must be a whole number of pairs")
        return Becomes({key: 2 * value}, "rows are counted, two a pair")

    return decide


def global_batch(value: Any, theirs: Theirs) -> Decision:
    """Rows (or pairs) of an optimizer step; those that do not sample have one such step in each of their steps."""
    algorithm = algorithm_of(theirs)
    if algorithm in ("sft", "dpo", "rm"):
        return Becomes({f"{algorithm}.global_batch_size": value})
    return Becomes({"policy.train_global_batch_size": value})


def length_of_answers(value: Any, theirs: Theirs) -> Decision:
    """The most tokens of a completion; theirs may equal the whole length, since a prompt takes its part of it."""
    longest = theirs.number("policy.max_total_sequence_length", 0)
    if isinstance(value, int) and longest and value >= longest:
        return Becomes({"policy.generation.max_new_tokens": longest - 1}, "a prompt has one token at least, of the same length")
    return Becomes({"policy.generation.max_new_tokens": value})


def temperature_of_validation(value: Any, theirs: Theirs) -> Decision:
    """Greedy, or as in training."""
    if value in (0, theirs.get("policy.generation.temperature", 1.0)):
        return Becomes({"policy.generation.val_temperature": value})
    return Refused("an engine samples at one temperature: that of training, or 0 for validation")


def as_in_training(key: str) -> Callable[[Any, Theirs], Decision]:
    """A filter of validation, which must be that of training."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if value == theirs.get(f"policy.generation.{key}", value):
            return Unneeded("validation filters as training does")
        return Refused("validation filters as training does; only its temperature may be another")

    return decide


def unfiltered(key: str, neutral: Any) -> Callable[[Any, Theirs], Decision]:
    """A filter of sampling that an algorithm cannot train on."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if value is None or value == neutral:
            return Becomes({f"policy.generation.{key}": neutral})
        return Refused(
            "tokens would be drawn from a filtered distribution and scored under the whole one; grpo refuses that here"
        )

    return decide


def engine(value: Any, theirs: Theirs) -> Decision:
    """The generation backend."""
    if value in ("vllm", "hf"):
        return Becomes({"policy.generation.backend": value})
    return Refused(f"there is no generation backend {value!r} here: say which `policy.generation.backend` samples")


def engine_precision(value: Any, theirs: Theirs) -> Decision:
    """The type of the engine's weights."""
    if value in ("float32", "bfloat16", "float16"):
        return Becomes({"policy.generation.vllm_cfg.precision": value})
    return Refused("the engine takes the policy's precision; a quantised one goes under vllm_kwargs.quantization")


ELSEWHERE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "enable_chunked_prefill")
"""Arguments of vLLM that have a key of their own here, or none."""


def engine_arguments(value: Any, theirs: Theirs) -> Decision:
    """Arguments of vLLM, by their names there."""
    if not isinstance(value, Mapping) or not value:
        return Unneeded("none")
    return Becomes({"policy.generation.vllm_kwargs": {key: it for key, it in value.items() if key not in ELSEWHERE}})


def cache_size(value: Any, theirs: Theirs) -> Decision:
    """The size of the KV cache."""
    if not isinstance(value, int):
        return Refused("must be a whole number of bytes")
    return Becomes({"policy.generation.vllm_cfg.kv_cache_gib": value / 2**30}, "in GiB")


def rows_decoded(value: Any, theirs: Theirs) -> Decision:
    """Rows decoded together, which theirs says for an engine of Transformers alone."""
    if theirs.get("policy.generation.backend") == "hf":
        return Becomes({"policy.generation.hf_cfg.max_batch_rows": value})
    return Unneeded("the engine batches by itself")


def logprob_chunk(value: Any, theirs: Theirs) -> Decision:
    """Positions whose logits exist at one time."""
    if value is None:
        return Unneeded("logits are made in chunks in any case")
    return Becomes({f"policy.{_section(theirs)}.logprob_chunk_tokens": value})


def config_overrides(value: Any, theirs: Theirs) -> Decision:
    """Fields of the model's own config."""
    if not value:
        return Unneeded("none")
    if is_megatron(theirs):
        return Refused("Megatron builds the model by its config as it is")
    return Becomes({"policy.hf_cfg.config_overrides": value})


def keywords(value: Any, theirs: Theirs) -> Decision:
    """Keyword arguments of the optimizer."""
    return Becomes({"policy.optimizer.kwargs": value})


def packer(value: Any, theirs: Theirs) -> Decision:
    """How rows are put into microbatches."""
    known = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")
    if value in known:
        return Becomes({"policy.sequence_packing.algorithm": value})
    return Refused(f"packers here: {', '.join(known)}")


def lora(value: Any, theirs: Theirs) -> Decision:
    """Adapters: the section itself switches them on."""
    return Becomes({"policy.hf_cfg.lora": {}}, "the section itself switches adapters on")


def lora_targets(value: Any, theirs: Theirs) -> Decision:
    """Layers that get adapters, by name."""
    if not value or theirs.get("policy.dtensor_cfg.lora_cfg.match_all_linear") is True:
        return Unneeded("match_all_linear decides")
    return Becomes({"policy.hf_cfg.lora.target_modules": value})


def all_linear(value: Any, theirs: Theirs) -> Decision:
    """All linear layers get adapters."""
    if value is True:
        return Becomes({"policy.hf_cfg.lora.target_modules": "all-linear"}, "all but the LM head")
    return Unneeded("target_modules decides")


def dropout_position(value: Any, theirs: Theirs) -> Decision:
    """Where an adapter drops its inputs, or its outputs."""
    if value == "pre" or not theirs.get("policy.dtensor_cfg.lora_cfg.dropout"):
        return Unneeded("nothing is dropped, or an adapter's inputs are")
    return Refused("dropout is of an adapter's inputs, as in peft")


def lora_exclusions(value: Any, theirs: Theirs) -> Decision:
    """Layers that get none."""
    return Becomes({"policy.hf_cfg.lora.exclude_modules": value}) if value else Unneeded("none")


def expert_tensor_ranks(value: Any, theirs: Theirs) -> Decision:
    """Ranks that share a matrix of an expert, which counts where experts are divided."""
    if theirs.number("policy.megatron_cfg.expert_model_parallel_size", 1) == 1:
        return Unneeded("experts are not divided over ranks, and are then shared as all other matrices are")
    return Becomes({"policy.megatron_cfg.expert_tensor_parallel_size": value})


def sequence_ranks(value: Any, theirs: Theirs) -> Decision:
    """Sequence parallelism, over tensor-parallel ranks."""
    if value is True and theirs.number("policy.megatron_cfg.tensor_model_parallel_size", 1) == 1:
        return Unneeded("there is one tensor-parallel rank, and nothing to divide a sequence over")
    return Becomes({"policy.megatron_cfg.sequence_parallel": value})


def recomputation(value: Any, theirs: Theirs) -> Decision:
    """Activation checkpointing of Megatron: of whole layers, or of attention alone."""
    if value is not True:
        return Becomes({"policy.activation_checkpointing": value})
    if theirs.get("policy.megatron_cfg.recompute_granularity", "full") == "selective":
        return Becomes({"policy.megatron_cfg.recompute_granularity": "selective"})
    return Becomes({"policy.activation_checkpointing": True})


def granularity(value: Any, theirs: Theirs) -> Decision:
    """What is computed again, where anything is."""
    if theirs.get("policy.megatron_cfg.activation_checkpointing") is not True:
        return Unneeded("activation_checkpointing is off")
    return recomputation(True, theirs)


def pipeline_type(value: Any, theirs: Theirs) -> Decision:
    """The type that travels between stages."""
    if value == theirs.get("policy.precision"):
        return Unneeded("stages speak in policy.precision")
    return Refused("stages speak in policy.precision")


def optimizer_type(name: str) -> Callable[[Any, Theirs], Decision]:
    """Whether the optimizer's own word on the type agrees with `policy.precision`."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if value is (theirs.get("policy.precision") == name):
            return Unneeded("policy.precision says so")
        return Refused("policy.precision decides, and says otherwise")

    return decide


def gathered_weights(value: Any, theirs: Theirs) -> Decision:
    """Overlapped gathering, which needs weights that are divided."""
    divided = theirs.get("policy.megatron_cfg.optimizer.use_distributed_optimizer") is True
    overlapped = theirs.get("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce") is True
    if value is True and not (divided and overlapped):
        return Unneeded("it acts with use_distributed_optimizer and overlap_grad_reduce alone")
    return Becomes({"policy.megatron_cfg.overlap_param_gather": value})


def megatron_optimizer(value: Any, theirs: Theirs) -> Decision:
    """Megatron's optimizer by its class in PyTorch."""
    names = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
    if str(value) in names:
        return Becomes({"policy.optimizer.name": names[str(value)]})
    return Refused(f"Megatron-Core trains with {' or '.join(names)} here")


def adam_argument(name: str) -> Callable[[Any, Theirs], Decision]:
    """An argument of Adam, where Adam trains."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        at = "policy.megatron_cfg.optimizer"
        if theirs.get(f"{at}.optimizer", "adam") != "adam":
            return Unneeded("the optimizer is another one")
        if name == "betas":
            value = [theirs.get(f"{at}.adam_beta1", 0.9), theirs.get(f"{at}.adam_beta2", 0.999)]
        return Becomes({f"policy.optimizer.kwargs.{name}": value})

    return decide


def sgd_momentum(value: Any, theirs: Theirs) -> Decision:
    """The momentum of SGD, where SGD trains."""
    if theirs.get("policy.megatron_cfg.optimizer.optimizer", "adam") != "sgd":
        return Unneeded("the optimizer is another one")
    return Becomes({"policy.optimizer.kwargs.momentum": value})


def clipping(value: Any, theirs: Theirs) -> Decision:
    """The gradient norm, which Megatron's optimizer has a key of its own for; 0 leaves gradients as they are."""
    own = theirs.get("policy.megatron_cfg.optimizer.clip_grad") if is_megatron(theirs) else None
    if own is not None and own != value:
        return Unneeded("megatron_cfg.optimizer.clip_grad decides")
    return Becomes({"policy.max_grad_norm": None if value == 0 else value})


def megatron_schedule(value: Any, theirs: Theirs) -> Decision:
    """Megatron's schedule: a warm-up, then constant, a line or a cosine."""
    at = "policy.megatron_cfg.scheduler"
    warmup, length = theirs.number(f"{at}.lr_warmup_iters", 0), theirs.number(f"{at}.lr_decay_iters", 0)
    highest, lowest = (theirs.get(f"policy.megatron_cfg.optimizer.{key}", 0.0) for key in ("lr", "min_lr"))
    kwargs: dict[str, Any] = {"num_warmup_steps": warmup}
    are_rates = all(isinstance(rate, int | float) for rate in (highest, lowest))
    if value in ("linear", "cosine") and not (length and are_rates and highest > 0):
        return Refused("lr_decay_iters and the optimizer's lr must say how far it falls, and over how many steps")
    if value == "linear" and lowest:
        return Refused("a line ends at 0 here, and min_lr is not 0: take `cosine`, or any scheduler by its dotted name")
    if value == "cosine":
        kwargs |= {"num_training_steps": length, "min_lr_ratio": lowest / highest}
    elif value == "linear":
        kwargs |= {"num_training_steps": length}
    elif value != "constant":
        return Refused("schedules here: constant, linear, cosine, or any scheduler by its dotted name")
    ours = {"policy.scheduler.name": value, **{f"policy.scheduler.kwargs.{name}": it for name, it in kwargs.items()}}
    return Becomes(ours, "the warm-up begins at lr / (num_warmup_steps + 1)" if warmup else "")


def part_of_schedule(value: Any, theirs: Theirs) -> Decision:
    """A number that `lr_decay_style` is converted with."""
    style = theirs.get("policy.megatron_cfg.scheduler.lr_decay_style", "constant")
    found = megatron_schedule(style, theirs)
    return Becomes(found.values, "part of the schedule") if isinstance(found, Becomes) else found


def warmup_start(value: Any, theirs: Theirs) -> Decision:
    """The learning rate that a warm-up begins with."""
    if not theirs.number("policy.megatron_cfg.scheduler.lr_warmup_iters", 0):
        return Unneeded("there is no warm-up")
    return Refused("a warm-up begins at lr / (num_warmup_steps + 1)")


def constant_decay(value: Any, theirs: Theirs) -> Decision:
    """A schedule of the weight decay, which has none here."""
    if value in ("constant", theirs.get("policy.megatron_cfg.optimizer.weight_decay")):
        return Unneeded("weight decay is constant")
    return Refused("weight decay is constant")


def schedulers(value: Any, theirs: Theirs) -> Decision:
    """A list of PyTorch's schedulers with milestones; ours takes one, so what follows it must leave the rate alone."""
    listed = value if isinstance(value, list) else [value]
    stages = [one for one in listed if isinstance(one, Mapping) and "name" in one]
    milestones: Any = next((one["milestones"] for one in listed if isinstance(one, Mapping) and "milestones" in one), [])
    moving = [one for one in stages if not _is_constant_one(one)]
    if not moving and stages:
        return Unneeded("the learning rate is constant by default")
    first = stages[0] if stages else {}
    arguments = first.get("kwargs") or {}
    ends_at_one = first.get("name") == f"{_SCHEDULERS}.LinearLR" and arguments.get("end_factor", 1.0) == 1.0
    warms_up = ends_at_one and milestones == [arguments.get("total_iters")]
    if moving == stages[:1] and stages and (len(stages) == 1 or warms_up):
        note = "what follows it leaves the rate as it is" if len(stages) > 1 else ""
        return Becomes({"policy.scheduler.name": first["name"], "policy.scheduler.kwargs": dict(arguments)}, note)
    return Refused("one scheduler is taken here: `linear` or `cosine` with num_warmup_steps, or a factory by its dotted name")


def _is_constant_one(stage: Mapping[str, Any]) -> bool:
    return stage["name"] == f"{_SCHEDULERS}.ConstantLR" and (stage.get("kwargs") or {}).get("factor") == 1.0


def _section(theirs: Theirs) -> str:
    return "megatron_cfg" if is_megatron(theirs) else "hf_cfg"
