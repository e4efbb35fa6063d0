"""The rows of NeMo RL's sections `ppo` and `value_loss_fn`, and those that only `value` has."""

from __future__ import annotations

from rl_core.config.importing.nemo_rl import algorithms
from rl_core.config.importing.rows import Row, by, never, nothing, only, same, to

_OFF = "disabled"

PPO: list[Row] = [
    *same("ppo", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed overlong_filtering ppo_epochs"),
    *same("ppo", "max_val_samples val_num_generations_per_prompt advantage_clip_low advantage_clip_high"),
    *same("ppo.reward_scaling", "enabled source_min source_max target_min target_max"),
    *same("ppo.reward_shaping", "enabled overlong_buffer_length max_response_length"),
    by("ppo.reward_shaping.overlong_buffer_penalty", algorithms.overlong_penalty("ppo")),
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
    *only("ppo.adv_estimator", "name", ["gae"], since="same here", reason="ppo estimates advantages by GAE; others are grpo's"),
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
        since="same here",
        reason="the critic has an optimizer of its own, whose learning rate says how fast it learns",
    ),
    *nothing("value", "reward_model_cfg.enabled reward_model_cfg.reward_model_type", "a critic has a scalar head"),
]
