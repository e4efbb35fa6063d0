"""The rows of NeMo RL's sections `ppo` and `value_loss_fn`, and those that only `value` has."""

from __future__ import annotations

from rlcore_cli.importing.nemo_rl import algorithms
from rlcore_cli.importing.rows import (
    Redundant,
    Row,
    converted,
    is_empty,
    kept,
    redundant,
    redundant_if,
    renamed,
    same,
    unsupported,
)

_OFF = "disabled"

PPO: list[Row] = [
    *same("ppo", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed overlong_filtering ppo_epochs"),
    *same("ppo", "max_val_samples val_num_generations_per_prompt advantage_clip_low advantage_clip_high"),
    *same("ppo.reward_scaling", "enabled source_min source_max target_min target_max"),
    *same("ppo.reward_shaping", "enabled overlong_buffer_length max_response_length"),
    converted("ppo.reward_shaping.overlong_buffer_penalty", algorithms.overlong_penalty("ppo")),
    *redundant_if("ppo.reward_shaping", "stop_properly_penalty_coef", [], since=_OFF, reason="implement it in the environment"),
    converted("ppo.max_num_steps", algorithms.steps),
    converted("ppo.max_num_epochs", algorithms.epochs),
    renamed("ppo.policy_training_start_step", "ppo.critic_warmup_steps"),
    *algorithms.validation_rows("ppo"),
    algorithms.unless_null("ppo.val_batch_size"),
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
