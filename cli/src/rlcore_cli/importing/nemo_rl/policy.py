"""Conversions of NeMo RL's section `policy`: batches, parallelism, optimizer, schedule, sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore_cli.importing.nemo_rl.facts import algorithm_of, has_pairs, is_megatron
from rlcore_cli.importing.rows import Decision, ForeignConfig, Mapped, Redundant, Unsupported

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
