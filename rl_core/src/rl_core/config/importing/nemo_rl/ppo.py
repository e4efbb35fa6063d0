"""The rows of NeMo RL's sections `ppo`, `value_loss_fn` and `value`, the last of which is like `policy` and has its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.config.importing.nemo_rl import algorithms
from rl_core.config.importing.rows import Becomes, Decision, Row, Switch, Theirs, by, never, nothing, only, same, to

_OFF = "off there"

PPO: list[Row] = [
    *same("ppo", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed overlong_filtering ppo_epochs"),
    *same("ppo", "max_val_samples val_num_generations_per_prompt advantage_clip_low advantage_clip_high"),
    *same("ppo.reward_scaling", "enabled source_min source_max target_min target_max"),
    *same("ppo.reward_shaping", "enabled overlong_buffer_length overlong_buffer_penalty max_response_length"),
    *only("ppo.reward_shaping", "stop_properly_penalty_coef", [], since=_OFF, reason="the environment says what that costs"),
    by("ppo.max_num_steps", algorithms.steps),
    by("ppo.max_num_epochs", algorithms.epochs),
    to("ppo.policy_training_start_step", "ppo.critic_warmup_steps"),
    *(by(f"ppo.{key}", algorithms.needs_validation(f"ppo.{key}")) for key in ("val_period", "val_at_start", "val_at_end")),
    by("ppo.val_batch_size", algorithms.unless_null("ppo.val_batch_size")),
    *only("ppo", "use_dynamic_sampling", [False], since=_OFF, reason="a critic compares no groups, so none is left out"),
    *nothing("ppo", "dynamic_sampling_max_gen_batches batch_multiplier", "dynamic sampling is grpo's"),
    *nothing("ppo", "skip_reference_policy_logprobs_calculation", "the reference is asked where the penalty is not 0"),
    *only("ppo", "seq_logprob_error_threshold", [], since=_OFF, reason="truncated_importance_sampling_type leaves rows out"),
    *never("ppo", "async_ppo.**", "rollouts are sampled with the newest weights here"),
    *only("ppo.adv_estimator", "name", ["gae"], since="so it is", reason="ppo estimates advantages by GAE; others are grpo's"),
    to("ppo.adv_estimator.gae_lambda", "ppo.gae.lam"),
    to("ppo.adv_estimator.gae_gamma", "ppo.gae.gamma"),
    to("ppo.adv_estimator.gae_lambda_value", "ppo.gae.value_lam"),
    to("ppo.adv_estimator.normalize_advantages", "ppo.gae.normalize_advantages"),
    *only("ppo.adv_estimator", "gae_lambda_policy", [], since="gae_lambda is it", reason="gae_lambda is that of the policy"),
    by("ppo.adv_estimator.length_adaptive_alpha", algorithms.unless_zero("ppo.gae.length_adaptive_alpha")),
    to("value_loss_fn.cliprange", "ppo.value_loss.cliprange_value"),
    *only(
        "value_loss_fn",
        "scale",
        [1.0],
        since="so it is",
        reason="the critic has an optimizer of its own, whose learning rate says how fast it learns",
    ),
    *nothing("value", "reward_model_cfg.enabled reward_model_cfg.reward_model_type", "a critic has a scalar head"),
]


def as_critic(rows: Sequence[Row]) -> list[Row]:
    """Rows of `policy` as those of `value`; what samples is the policy's alone."""
    return [_row(row) for row in rows if not row.pattern.startswith("policy.generation")]


def switches_of_critic(switches: Sequence[Switch]) -> list[Switch]:
    """Switches of `policy` as those of `value`."""
    found = [switch for switch in switches if switch.pattern.startswith("policy.") and ".generation" not in switch.pattern]
    return [_switch(switch) for switch in found]


def _row(row: Row) -> Row:
    def decide(value: Any, theirs: Theirs) -> Decision:
        decision = row.decide(value, _with_critic_as_policy(theirs))
        if not isinstance(decision, Becomes):
            return decision
        return Becomes({_renamed(key): it for key, it in decision.values.items()}, decision.note)

    return Row(pattern=_renamed(row.pattern), decide=decide, whole=row.whole, as_it_is=row.as_it_is)


def _switch(switch: Switch) -> Switch:
    return Switch(
        pattern=_renamed(switch.pattern),
        is_on=lambda theirs: switch.is_on(_with_critic_as_policy(theirs)),
        off=_renamed(switch.off),
    )


def _with_critic_as_policy(theirs: Theirs) -> Theirs:
    return Theirs({**theirs.values, "policy": theirs.values.get("value")})


def _renamed(key: str) -> str:
    return f"value.{key.removeprefix('policy.')}" if key.startswith("policy.") else key
