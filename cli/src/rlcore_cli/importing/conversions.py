"""Conversions of NeMo RL's values, and conditions on them, that the table refers to by name.

Each takes the value and the whole config. Those of datasets are in `datasets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_train.config.schema import parse_duration
from rlcore_cli.importing.foreign import Decision, ForeignConfig, Mapped, Redundant, Unsupported

_METRICS = {
    "val:accuracy": "validation/accuracy",
    "val:reward": "validation/reward",
    "val:loss": "validation/loss",
    "val:val_loss": "validation/loss",
    "train:loss": "loss",
    "train:reward": "reward/mean",
    "train:grad_norm": "grad_norm",
}
_NOT_WRITTEN_BY = {
    "validation/loss": ("grpo", "gdpo"),
    "validation/accuracy": ("sft",),
    "validation/reward": ("sft", "dpo", "rm"),
    "reward/mean": ("sft", "dpo", "rm"),
}
_SCHEDULERS = "torch.optim.lr_scheduler"
_ELSEWHERE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "enable_chunked_prefill")
"""vLLM arguments that have a config key, or no equivalent."""


def negative(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the value is a negative integer."""
    return isinstance(value, int) and value < 0


def empty(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the value is null, false, zero or empty."""
    return not value


def without_validation_data(value: Any, foreign: ForeignConfig) -> bool:
    """Whether validation is enabled but has no data."""
    return value not in (False, 0) and not foreign.validates


def normalized_rewards(value: Any, foreign: ForeignConfig) -> bool:
    """Whether rewards are normalized."""
    key = "normalize_rewards"
    return foreign.get(f"grpo.adv_estimator.{key}", foreign.get(f"grpo.{key}", True)) is True


def megatron_clips_otherwise(value: Any, foreign: ForeignConfig) -> bool:
    """Whether Megatron's optimizer has another maximum gradient norm."""
    own = foreign.get("policy.megatron_cfg.optimizer.clip_grad")
    return foreign.get("policy.megatron_cfg.enabled") is True and own is not None and own != value


def unranked(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the number of ranked checkpoints is not set, or the metric that ranks them cannot be converted."""
    return value is None or not isinstance(metric(foreign.get("checkpointing.metric_name"), foreign), Mapped)


def validation_batches(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the number of validation batches to records."""
    size = foreign.number(f"{foreign.algorithm}.val_global_batch_size", 0)
    if not foreign.validates:
        return Redundant("no validation")
    if not isinstance(value, int) or not size:
        return Unsupported("val_global_batch_size is needed to convert batches to records")
    if value <= 0:
        return Redundant("all held-out records are used by default")
    return Mapped({f"{foreign.algorithm}.max_val_samples": value * size}, "counts records instead of batches")


def importance_correction(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the importance-sampling correction for the log-probabilities of the generation backend."""
    notes = []
    if value is True and foreign.get("loss_fn.sequence_level_importance_ratios") is True:
        notes.append("each token has its own correction weight; NeMo RL has one per sequence with sequence-level ratios")
    if value is True and foreign.get("loss_fn.truncated_importance_sampling_ratio") is None:
        notes.append("weights are truncated at 2.0 by default; NeMo RL leaves them unbounded unless a bound is set")
    return Mapped({"loss_fn.use_importance_sampling_correction": value}, "; ".join(notes))


def kl_type(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the KL estimator."""
    is_penalized = foreign.get("loss_fn.reference_policy_kl_penalty", 0.01) != 0
    in_reward = foreign.get("loss_fn.use_kl_in_reward") is True
    if value == "k1" and is_penalized and not in_reward:
        return Unsupported("k1 in the loss has an expected gradient of zero: k3 is used instead, or set use_kl_in_reward")
    if value in ("k2", "k3") and is_penalized and in_reward:
        return Unsupported(f"{value} in the reward has a wrong gradient, which increases the KL: k1 is used instead")
    return Mapped({"loss_fn.reference_policy_kl_type": value})


def metric(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the metric that ranks checkpoints."""
    if value is None:
        return Redundant("no ranking")
    name = str(value)
    if name.startswith("val:validation") and name.endswith("_loss"):
        name = "val:loss"
    if name not in _METRICS:
        return Unsupported("no equivalent metric; see docs/metrics.md")
    if name.startswith("val:") and not foreign.validates:
        return Unsupported("ranking checkpoints by it needs validation data")
    if foreign.algorithm in _NOT_WRITTEN_BY.get(_METRICS[name], ()):
        return Unsupported(f"{foreign.algorithm} does not write {_METRICS[name]}; see docs/metrics.md")
    return Mapped({"checkpointing.metric_name": _METRICS[name]})


def time_limit(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the time limit of the run: seconds, or `DD:HH:MM:SS`, which becomes `D-HH:MM:SS`."""
    if value is None:
        return Redundant("disabled")
    days, _, rest = str(value).partition(":")
    limit = f"{int(days)}-{rest}" if rest.count(":") == 2 and days.isdigit() else value
    try:
        parse_duration(limit)
    except (TypeError, ValueError) as error:
        return Unsupported(str(error))
    return Mapped({"checkpointing.max_time": limit})


def pairs_as_rows(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert a micro-batch of pairs to rows; algorithms without pairs keep the number."""
    key = "policy.train_micro_batch_size"
    if not foreign.has_pairs:
        return Mapped({key: value})
    if not isinstance(value, int):
        return Unsupported("must be a whole number of pairs")
    return Mapped({key: 2 * value}, "counts rows, two per pair")


def length_of_prompts(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum prompt length, which must leave space for a completion."""
    if not foreign.samples:
        return Redundant("without sampling, policy.max_total_sequence_length limits the rows")
    return _below_total("data.max_input_seq_length", value, foreign, "one token is reserved for the completion")


def length_of_answers(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum completion length. In NeMo RL it may equal the total length, which includes the prompt."""
    return _below_total("policy.generation.max_new_tokens", value, foreign, "one token is reserved for the prompt")


def _below_total(key: str, value: Any, foreign: ForeignConfig, note: str) -> Decision:
    total = foreign.number("policy.max_total_sequence_length", 0)
    is_all = isinstance(value, int) and total and value >= total
    return Mapped({key: total - 1}, note) if is_all else Mapped({key: value})


def engine_arguments(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the arguments passed to vLLM."""
    if not isinstance(value, Mapping) or not value:
        return Redundant("none")
    return Mapped({"policy.generation.vllm_kwargs": {key: it for key, it in value.items() if key not in _ELSEWHERE}})


def cache_size(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the size of the KV cache."""
    if not isinstance(value, int):
        return Unsupported("must be a whole number of bytes")
    return Mapped({"policy.generation.vllm_cfg.kv_cache_gib": value / 2**30}, "in GiB")


def betas(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the betas of Adam, which are two keys of Megatron's optimizer."""
    at = "policy.megatron_cfg.optimizer"
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
