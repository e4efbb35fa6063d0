"""Conversions of NeMo RL's algorithm sections, losses and checkpointing.

The rows of NeMo RL's sections `distillation` and `teacher`, and of the loss that compares the two models.

The rows of NeMo RL's sections `ppo` and `value_loss_fn`, and those that only `value` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_train.config.schema import parse_duration
from rlcore_cli.importing.nemo_rl.facts import algorithm_of, validates
from rlcore_cli.importing.rows import (
    Case,
    Decision,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Unsupported,
    cases,
    converted,
    is_empty,
    is_null,
    kept,
    one_of,
    other_than,
    redundant,
    redundant_if,
    renamed,
    same,
    unsupported,
)

_GROUPS = ("grpo", "gdpo")
_STD_OF_ALL = (
    "rewards are divided by the standard deviation of the whole group; NeMo RL excludes the sample itself, so its advantages "
    "differ"
)
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
    "validation/loss": _GROUPS,
    "validation/accuracy": ("sft",),
    "validation/reward": ("sft", "dpo", "rm"),
    "reward/mean": ("sft", "dpo", "rm"),
}


def validation_rows(algorithm: str) -> list[Row]:
    """Rows for the keys that enable validation, which needs validation data."""
    return [
        kept(
            key,
            (_is_negative, Mapped({key: 0}, "off")),
            (
                lambda value, foreign: value not in (False, 0) and not validates(foreign),
                Unsupported("no validation data: set data.validation, or hold out training data with data.split"),
            ),
        )
        for key in (f"{algorithm}.{name}" for name in ("val_period", "val_at_start", "val_at_end"))
    ]


def _is_negative(value: Any, foreign: ForeignConfig) -> bool:
    return isinstance(value, int) and value < 0


def validation_batches(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the number of validation batches to records."""
    algorithm = algorithm_of(foreign)
    size = foreign.number(f"{algorithm}.val_global_batch_size", 0)
    if not validates(foreign):
        return Redundant("no validation")
    if not isinstance(value, int) or not size:
        return Unsupported("val_global_batch_size is needed to convert batches to records")
    if value <= 0:
        return Redundant("all held-out records are used by default")
    return Mapped({f"{algorithm}.max_val_samples": value * size}, "counts records instead of batches")


def steps(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum number of steps; a negative number means no limit, so that max_num_epochs ends the run."""
    key = f"{algorithm_of(foreign)}.max_num_steps"
    if isinstance(value, int) and value < 0:
        return Mapped({key: 1_000_000}, "large enough that max_num_epochs ends the run")
    return Mapped({key: value})


def epochs(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the maximum number of epochs."""
    algorithm = algorithm_of(foreign)
    if algorithm == "grpo" and foreign.get("grpo.use_dynamic_sampling") is True:
        return Unsupported("with dynamic sampling, an epoch has no fixed number of steps: set max_num_steps")
    if isinstance(value, int) and value < 0:
        return Redundant("no limit by default")
    return Mapped({f"{algorithm}.max_num_epochs": value})


def overlong_penalty(algorithm: str) -> Callable[[Any, ForeignConfig], Decision]:
    """Return the conversion of the penalty for completions close to the length limit."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        note = "this value bounds the penalty; NeMo RL's grows beyond the limit and counts only the first turn"
        is_on = foreign.get(f"{algorithm}.reward_shaping.enabled") is True
        if value is None:
            return Redundant("the default is used")
        return Mapped({f"{algorithm}.reward_shaping.overlong_buffer_penalty": value}, note if is_on else "")

    return decide


def kl_penalty(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the weight of the KL penalty to the reference policy."""
    in_loss = bool(value) and foreign.get("loss_fn.use_kl_in_reward") is not True
    note = (
        "the gradient is that of the KL estimator only; NeMo RL adds a score-function term, so the same weight has a different "
        "effect"
    )
    return Mapped({"loss_fn.reference_policy_kl_penalty": value}, note if in_loss else "")


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


def on_policy(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the switch that sets the ratio to exactly 1 if a step makes one optimizer step."""
    if value is not True:
        return Redundant("the ratio is exactly 1 anyway if a step makes one optimizer step")
    return Mapped({f"{algorithm_of(foreign)}.skip_logprobs_when_on_policy": True}, "if a step makes one optimizer step")


def metric(value: Any, foreign: ForeignConfig) -> Decision:
    """Convert the metric that ranks checkpoints."""
    if value is None:
        return Redundant("no ranking")
    name = str(value)
    if name.startswith("val:validation") and name.endswith("_loss"):
        name = "val:loss"
    if name not in _METRICS:
        return Unsupported("no equivalent metric; see docs/metrics.md")
    if name.startswith("val:") and not validates(foreign):
        return Unsupported("ranking checkpoints by it needs validation data")
    if (algorithm := algorithm_of(foreign)) in _NOT_WRITTEN_BY.get(_METRICS[name], ()):
        return Unsupported(f"{algorithm} does not write {_METRICS[name]}; see docs/metrics.md")
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


def ranks_checkpoints(foreign: ForeignConfig) -> bool:
    """Whether the metric that ranks checkpoints can be converted."""
    return isinstance(metric(foreign.get("checkpointing.metric_name"), foreign), Mapped)


def unless_null(pattern: str, *, to: str | None = None) -> Row:
    """A row for a key that may be null in NeMo RL but not in rlcore."""
    return kept(pattern, (is_null, Redundant("the default is used")), to=to)


def _estimator_is_not(*names: str) -> Callable[[Any, ForeignConfig], bool]:
    return lambda _, foreign: foreign.get("grpo.adv_estimator.name", "grpo") not in names


def _normalizes(foreign: ForeignConfig) -> bool:
    key = "normalize_rewards"
    return foreign.get(f"grpo.adv_estimator.{key}", foreign.get(f"grpo.{key}", True)) is True


def _group_estimator_rows(key: str, *exceptions: Case) -> list[Row]:
    """Rows for a key of group-relative advantage estimators, which older NeMo RL configs have in `grpo`."""
    native = f"grpo.adv_estimator.{key}"
    exceptions = ((_estimator_is_not(*_GROUPS), Redundant("the advantage estimator is not group-relative")), *exceptions)
    moved = (lambda _, foreign: foreign.get(native) is not None, Redundant(f"adv_estimator.{key} takes precedence"))
    return [kept(f"grpo.{key}", moved, *exceptions, to=native), kept(native, *exceptions)]


ESTIMATOR: list[Row] = [
    *_group_estimator_rows("normalize_rewards"),
    *_group_estimator_rows(
        "use_leave_one_out_baseline",
        (
            lambda on, foreign: on is True and _normalizes(foreign),
            Mapped({"grpo.adv_estimator.use_leave_one_out_baseline": True}, _STD_OF_ALL),
        ),
    ),
    kept(
        "grpo.adv_estimator.name",
        (
            other_than(*_GROUPS, "reinforce_plus_plus"),
            Unsupported("estimators: grpo, rloo, reinforce_plus_plus, gdpo, turn_level, or the path of an AdvantageEstimator"),
        ),
    ),
    kept(
        "grpo.adv_estimator.minus_baseline",
        (_estimator_is_not("reinforce_plus_plus"), Redundant("only reinforce_plus_plus uses it")),
    ),
]
"""The advantage estimator."""

TRUNCATION: list[Row] = [
    kept(
        f"loss_fn.truncated_importance_sampling_{key}",
        (
            lambda _, foreign: foreign.get("loss_fn.use_importance_sampling_correction") is not True,
            Redundant("the importance-sampling correction is disabled"),
        ),
        (is_null, of_null),
    )
    for key, of_null in (
        ("type", Unsupported("weights are always truncated, by default at 2.0 with `tis`")),
        ("ratio", Redundant("the default bound is used")),
        ("ratio_min", Redundant("the default bound is used")),
    )
]
"""Truncated importance sampling, which has an effect only if the correction is enabled."""


_DIVERGENCES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_NO_STEP = "the teacher is not trained"


def _is_not_distilled(value: Any, foreign: ForeignConfig) -> bool:
    return algorithm_of(foreign) != "distillation"


_NO_TEACHER = (_is_not_distilled, Redundant("only distillation uses a teacher"))

DISTILLATION: list[Row] = [
    *same("distillation", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed max_val_samples"),
    converted("distillation.max_num_steps", steps),
    converted("distillation.max_num_epochs", epochs),
    *validation_rows("distillation"),
    unless_null("distillation.val_batch_size"),
    kept(
        "distillation.topk_logits_k",
        (
            _is_not_distilled,
            Unsupported(
                "a config has one algorithm, and another one was found first: import distillation from a separate file"
            ),
        ),
        to="loss_fn.topk",
    ),
    cases(
        "loss_fn.kl_type",
        _NO_TEACHER,
        *((one_of(name), Mapped({"loss_fn.divergence": native})) for name, native in _DIVERGENCES.items()),
        otherwise=Unsupported(f"divergences: {', '.join(_DIVERGENCES.values())}, jsd"),
    ),
    kept(
        "loss_fn.mixed_kl_weight",
        (
            lambda _, foreign: algorithm_of(foreign) != "distillation" or foreign.get("loss_fn.kl_type", "mixed") != "mixed",
            Redundant("only kl_type: mixed uses it"),
        ),
        (
            one_of(0, 1),
            Unsupported("a weight of 0 or 1 is a single divergence: set loss_fn.divergence to reverse_kl or forward_kl"),
        ),
    ),
    cases(
        "loss_fn.zero_outside_topk",
        _NO_TEACHER,
        (
            lambda value, _: value is False,
            Mapped({"loss_fn.beyond_topk": "renormalize"}, "both models are renormalized over the teacher's top-k tokens"),
        ),
        otherwise=Mapped(
            {"loss_fn.beyond_topk": "bucket"},
            "tokens outside the top-k are treated as one more token; NeMo RL assigns them a teacher log-probability of -100",
        ),
    ),
    *redundant("teacher", "generation generation.** generation_batch_size", "the teacher does not sample"),
    *redundant("teacher", "optimizer optimizer.** scheduler scheduler.** max_grad_norm", _NO_STEP),
    *redundant("teacher", "train_global_batch_size train_micro_batch_size offload_optimizer_for_logprob", _NO_STEP),
    *redundant("teacher.megatron_cfg", "optimizer.** scheduler.** distributed_data_parallel_config.**", _NO_STEP),
    *redundant("teacher.dynamic_batching", "train_mb_tokens", _NO_STEP),
    *redundant("teacher.sequence_packing", "train_mb_tokens", _NO_STEP),
    *redundant(
        "teacher", "tokenizer.**", "the teacher must use the policy's tokenizer, which is checked before the run starts"
    ),
]

DEFAULTS: dict[str, Any] = {
    "distillation.num_prompts_per_step": 128,
    "distillation.topk_logits_k": 64,
    "loss_fn.kl_type": "mixed",
    "loss_fn.zero_outside_topk": False,
}
"""NeMo RL's defaults, where rlcore's differ."""


_OFF = "disabled"

PPO: list[Row] = [
    *same("ppo", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed overlong_filtering ppo_epochs"),
    *same("ppo", "max_val_samples val_num_generations_per_prompt advantage_clip_low advantage_clip_high"),
    *same("ppo.reward_scaling", "enabled source_min source_max target_min target_max"),
    *same("ppo.reward_shaping", "enabled overlong_buffer_length max_response_length"),
    converted("ppo.reward_shaping.overlong_buffer_penalty", overlong_penalty("ppo")),
    *redundant_if("ppo.reward_shaping", "stop_properly_penalty_coef", [], since=_OFF, reason="implement it in the environment"),
    converted("ppo.max_num_steps", steps),
    converted("ppo.max_num_epochs", epochs),
    renamed("ppo.policy_training_start_step", "ppo.critic_warmup_steps"),
    *validation_rows("ppo"),
    unless_null("ppo.val_batch_size"),
    *redundant_if("ppo", "use_dynamic_sampling", [False], since=_OFF, reason="with a critic there are no groups to filter"),
    *redundant("ppo", "dynamic_sampling_max_gen_batches batch_multiplier", "only grpo has dynamic sampling"),
    *redundant(
        "ppo", "skip_reference_policy_logprobs_calculation", "the reference policy is used only if the penalty is not 0"
    ),
    *redundant_if(
        "ppo", "seq_logprob_error_threshold", [], since=_OFF, reason="truncated_importance_sampling_type filters rows"
    ),
    *unsupported("ppo", "async_ppo.**", "rollouts are always sampled with the newest weights"),
    *redundant_if("ppo.adv_estimator", "name", ["gae"], since="same here", reason="ppo uses GAE; grpo has other estimators"),
    renamed("ppo.adv_estimator.gae_lambda", "ppo.gae.lam"),
    renamed("ppo.adv_estimator.gae_gamma", "ppo.gae.gamma"),
    renamed("ppo.adv_estimator.gae_lambda_value", "ppo.gae.value_lam"),
    renamed("ppo.adv_estimator.normalize_advantages", "ppo.gae.normalize_advantages"),
    *redundant_if(
        "ppo.adv_estimator", "gae_lambda_policy", [], since="gae_lambda is used", reason="gae_lambda applies to the policy"
    ),
    kept("ppo.adv_estimator.length_adaptive_alpha", (is_empty, Redundant("disabled")), to="ppo.gae.length_adaptive_alpha"),
    renamed("value_loss_fn.cliprange", "ppo.value_loss.cliprange_value"),
    *redundant_if(
        "value_loss_fn",
        "scale",
        [1.0],
        since="same here",
        reason="the critic has its own optimizer: set its learning rate instead",
    ),
    *redundant("value", "reward_model_cfg.enabled reward_model_cfg.reward_model_type", "a critic has a scalar head"),
]
