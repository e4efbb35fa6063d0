"""The import table of NeMo RL: all known keys and their conversions.

The first row that matches a key applies; a key without a row is reported as unsupported and unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore_cli.importing.nemo_rl import algorithms, data, facts
from rlcore_cli.importing.nemo_rl.algorithms import PPO
from rlcore_cli.importing.nemo_rl.policy_rows import POLICY, rows_for, switches_for
from rlcore_cli.importing.rows import (
    Defaulted,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Switch,
    Table,
    Unsupported,
    cases,
    converted,
    is_true,
    kept,
    other_than,
    redundant,
    redundant_if,
    renamed,
    same,
    unsupported,
)

_PENALTIES = "implement it in an advantage estimator or environment"
_LOGGED = "the run folder contains the rollouts of every step"
_OFF = "disabled"

_SECTIONS = (
    *facts.ALGORITHMS,
    *("loss_fn", "value_loss_fn", "policy", "value", "teacher", "data", "env", "logger", "cluster", "checkpointing"),
)

_ALWAYS: list[Row] = [
    cases(
        "policy.megatron_cfg.enabled",
        (is_true, Mapped({"policy.backend": "megatron"})),
        otherwise=Redundant("another policy backend is used"),
    ),
    cases(
        "policy.dtensor_cfg.enabled",
        (
            lambda on, foreign: on is True and not facts.is_megatron(foreign),
            Mapped({"policy.backend": "hf"}),
        ),
        otherwise=Redundant("policy.megatron_cfg.enabled selects the backend"),
    ),
]

_SWITCHES: list[Switch] = [
    Switch(pattern=f"{section}.**", is_on=facts.is_on(switch), off=f"{switch} is disabled")
    for section, switch in {
        "grpo.async_grpo": "grpo.async_grpo.enabled",
        "ppo.async_ppo": "ppo.async_ppo.enabled",
        "data_plane": "data_plane.enabled",
        "policy.draft": "policy.draft.enabled",
        "policy.megatron_cfg.fp8_cfg": "policy.megatron_cfg.fp8_cfg.enabled",
        "policy.megatron_cfg.peft": "policy.megatron_cfg.peft.enabled",
        "policy.megatron_cfg": "policy.megatron_cfg.enabled",
        "policy.dtensor_cfg.lora_cfg": "policy.dtensor_cfg.lora_cfg.enabled",
        "logger.wandb": "logger.wandb_enabled",
        "logger.tensorboard": "logger.tensorboard_enabled",
        "logger.mlflow": "logger.mlflow_enabled",
        "logger.swanlab": "logger.swanlab_enabled",
        "logger.gpu_monitoring": "logger.monitor_gpus",
    }.items()
] + [
    *(
        Switch(pattern=pattern, is_on=lambda foreign: not facts.is_megatron(foreign), off="megatron_cfg has its own")
        for pattern in ("policy.dtensor_cfg.**", "policy.optimizer.**", "policy.scheduler.**")
    ),
    Switch(pattern="policy.generation.**", is_on=facts.samples, off="the algorithm does not sample"),
    Switch(pattern="env.**", is_on=facts.samples, off="the algorithm does not use environments"),
    Switch(pattern="policy.generation.vllm_cfg.**", is_on=facts.engine_is("vllm"), off="another engine is used"),
    Switch(pattern="policy.generation.vllm_kwargs.**", is_on=facts.engine_is("vllm"), off="another engine is used"),
    Switch(
        pattern="policy.generation.mcore_generation_config.**",
        is_on=facts.engine_is("megatron"),
        off="another engine is used",
    ),
    Switch(
        pattern="policy.generation.colocated.resources.**",
        is_on=lambda foreign: foreign.get("policy.generation.colocated.enabled", True) is not True,
        off="policy and engine are colocated",
    ),
]

_GRPO: list[Row] = [
    *same("grpo", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed overlong_filtering"),
    *same("grpo", "advantage_clip_low advantage_clip_high dynamic_sampling_max_gen_batches"),
    kept(
        "grpo.use_dynamic_sampling",
        (
            is_true,
            Mapped(
                {"grpo.use_dynamic_sampling": True},
                "filters whole groups by the environment's rewards before scaling and shaping; NeMo RL 0.6 filters by shaped "
                "rewards, and single rows with leave-one-out",
            ),
        ),
    ),
    *same("grpo", "max_val_samples val_num_generations_per_prompt"),
    *same("grpo.reward_scaling", "enabled source_min source_max target_min target_max"),
    *same("grpo.reward_shaping", "enabled overlong_buffer_length max_response_length"),
    converted("grpo.reward_shaping.overlong_buffer_penalty", algorithms.overlong_penalty("grpo")),
    *redundant_if("grpo.reward_shaping", "stop_properly_penalty_coef", [], since=_OFF, reason=_PENALTIES),
    converted("grpo.max_num_steps", algorithms.steps),
    converted("grpo.max_num_epochs", algorithms.epochs),
    *algorithms.ESTIMATOR,
    *redundant_if(
        "grpo.adv_estimator", "reward_weights", [], since="1 each by default", reason="weights are set per reward name"
    ),
    kept(
        "grpo.batch_multiplier",
        (
            lambda _, foreign: foreign.get("grpo.use_dynamic_sampling") is not True,
            Redundant("dynamic sampling is disabled"),
        ),
    ),
    *algorithms.validation_rows("grpo"),
    algorithms.unless_null("grpo.val_batch_size"),
    *redundant_if("grpo", "val_start_at", [-1, 0], since="same here", reason="validation depends only on val_period"),
    *redundant_if(
        "grpo",
        "stop_at_validation_metric stop_at_validation_threshold seq_logprob_error_threshold",
        [],
        since=_OFF,
        reason="a run ends after its steps, and only truncated_importance_sampling_type filters rows",
    ),
    *redundant_if("grpo", "invalid_tool_call_advantage malformed_thinking_advantage", [], since=_OFF, reason=_PENALTIES),
    *redundant(
        "grpo",
        "skip_reference_policy_logprobs_calculation calculate_advantages_on_gpu deduplicate_multimodal_data "
        "debug_payload_metrics",
        "no effect; the reference policy is used only if the penalty is not 0",
    ),
    *unsupported("grpo", "async_grpo.**", "rollouts are always sampled with the newest weights"),
    *redundant_if("", "reward_penalties.**", [False], since=_OFF, reason=_PENALTIES),
    *redundant_if("", "on_policy_distillation.**", [], since=_OFF, reason="grpo does not use a teacher"),
]

_LOSS: list[Row] = [
    *same("loss_fn", "kl_input_clamp_value kl_output_clamp_value ratio_clip_min ratio_clip_max"),
    *same("loss_fn", "ratio_clip_c sequence_level_importance_ratios token_level_loss"),
    *same("loss_fn", "use_cispo disable_ppo_ratio name"),
    converted("loss_fn.reference_policy_kl_penalty", algorithms.kl_penalty),
    converted("loss_fn.use_importance_sampling_correction", algorithms.importance_correction),
    converted("loss_fn.reference_policy_kl_type", algorithms.kl_type),
    kept(
        "loss_fn.use_kl_in_reward",
        (
            lambda on, foreign: on is True and not foreign.get("loss_fn.reference_policy_kl_penalty", 0.01),
            Redundant("reference_policy_kl_penalty is 0, so nothing is subtracted from the reward"),
        ),
        (
            lambda on, foreign: on is True and foreign.get("loss_fn.reference_policy_kl_type") is None,
            Mapped(
                {"loss_fn.use_kl_in_reward": True},
                "the KL estimator in the reward is k1, because k2 and k3 have a wrong gradient there",
            ),
        ),
    ),
    converted("loss_fn.force_on_policy_ratio", algorithms.on_policy),
    *algorithms.TRUNCATION,
    *redundant_if("loss_fn", "use_on_policy_kl_approximation", [False], since=_OFF, reason="the KL estimate is not reweighted"),
    *redundant_if("loss_fn", "positive_example_nll_weight", [0.0], since=_OFF, reason="the loss has no log-likelihood term"),
]

_SUPERVISED: list[Row] = [
    row
    for name in ("sft", "dpo", "rm")
    for row in (
        *same(name, "seed"),
        converted(f"{name}.max_num_steps", algorithms.steps),
        converted(f"{name}.max_num_epochs", algorithms.epochs),
        *algorithms.validation_rows(name),
        converted(f"{name}.val_batches", algorithms.validation_batches),
        renamed(f"{name}.val_global_batch_size", f"{name}.val_batch_size"),
        *redundant(name, "val_micro_batch_size", "validation uses policy.train_micro_batch_size"),
    )
] + [
    *same("sft", "only_unmask_final"),
    kept(
        "dpo.preference_loss",
        (other_than("dpo", "ipo"), Unsupported("preference losses: dpo, ipo, dpo_hinge, simpo, orpo")),
        to="loss_fn.name",
    ),
    *(
        renamed(f"dpo.{key}", f"loss_fn.{key}")
        for key in (
            "reference_policy_kl_penalty",
            "preference_average_log_probs",
            "sft_average_log_probs",
            "preference_loss_weight",
            "sft_loss_weight",
        )
    ),
    *unsupported("dpo", "gt_reward_scale", "no loss has a reward scale"),
]

_REST: list[Row] = [
    *same("data", "shuffle train_data_path val_data_path"),
    *same("data.prompt", "prompt_config system_prompt examples_type"),
    converted("data.max_input_seq_length", data.length_of_prompts),
    *redundant("data", "num_workers", "the driver process reads the data"),
    *redundant_if(
        "data", "use_multiple_dataloader", [False], since=_OFF, reason="use data.mix, which mixes datasets by weight"
    ),
    *unsupported("data", "num_prompts_per_dataloader custom_dataloader", "use data.mix, which mixes datasets by weight"),
    *unsupported("data", "add_bos add_eos add_generation_prompt", "the chat template adds the special tokens"),
    *data.rows(),
    *redundant_if("data", "train validation default", [], since="not set", reason="must be a section"),
    *redundant_if(
        "env", "should_use_nemo_gym should_use_async_rollouts", [False], since=_OFF, reason="NeMo Gym is not supported"
    ),
    *redundant("env", "should_log_nemo_gym_responses", _LOGGED),
    kept(
        "env.*.env_cls",
        (
            lambda value, _: str(value).endswith("nemo_rl.environments.math_environment.MathEnvironment"),
            Mapped({"env.*.name": "math"}, "uses the environment `math` instead of NeMo's class"),
        ),
        (
            lambda value, _: str(value).startswith(("nemo_rl.", "nemo_skills.", "nemo_gym.")),
            Unsupported("NeMo class: port it to rl_core's EnvironmentInterface"),
        ),
    ),
    *same("env", "*.num_workers"),
    *redundant_if(
        "env",
        "*.math_verify_impl",
        ["hf_math_verify"],
        since="same here",
        reason="answers are always compared with math-verify",
    ),
    *same("checkpointing", "enabled checkpoint_dir higher_is_better save_period save_optimizer"),
    converted("checkpointing.metric_name", algorithms.metric),
    kept(
        "checkpointing.keep_top_k",
        (
            lambda value, foreign: value is None or not algorithms.ranks_checkpoints(foreign),
            Unsupported("checkpoints cannot be ranked because metric_name was not imported; the newest keep_latest_k are kept"),
        ),
    ),
    algorithms.unless_null("checkpointing.ft_keep_latest_k", to="checkpointing.keep_latest_k"),
    *redundant_if("checkpointing", "ft_save_period", [], since=_OFF, reason="checkpoints depend only on save_period"),
    converted("checkpointing.checkpoint_must_save_by", algorithms.time_limit),
    *redundant_if(
        "checkpointing",
        "model_save_format",
        ["safetensors"],
        since="same here",
        reason="weights are always saved as safetensors",
    ),
    *redundant_if(
        "checkpointing", "save_consolidated", [False], since=_OFF, reason="run `rlcore convert` on a checkpoint instead"
    ),
    *redundant_if("checkpointing", "is_async", [False], since=_OFF, reason="checkpoints are saved synchronously"),
    *unsupported("checkpointing", "pretrained_checkpoint.**", "runs start from policy.model_name, in Hugging Face format"),
    *same("logger", "log_dir"),
    *(
        cases(
            f"logger.{name}_enabled",
            (is_true, Mapped({f"logger.loggers.{name}.enabled": True})),
            otherwise=Redundant("disabled"),
        )
        for name in ("wandb", "tensorboard", "mlflow")
    ),
    *redundant_if("logger", "swanlab_enabled", [False], since=_OFF, reason="loggers: tensorboard, wandb, mlflow, or your own"),
    *redundant_if("logger", "monitor_gpus", [False], since=_OFF, reason="GPUs are not monitored"),
    *redundant_if("logger", "num_val_samples_to_print", [0], since=_OFF, reason=_LOGGED),
    renamed("logger.wandb.project", "logger.loggers.wandb.project"),
    renamed("logger.wandb.name", "logger.loggers.wandb.name"),
    renamed("logger.tensorboard.log_dir", "logger.loggers.tensorboard.log_dir"),
    *(
        renamed(f"logger.mlflow.{key}", f"logger.loggers.mlflow.{key}")
        for key in ("experiment_name", "run_name", "tracking_uri")
    ),
    *redundant("logger", "wandb.log_nemo_gym_full_result_tables", _LOGGED),
    *redundant_if("logger", "wandb tensorboard mlflow swanlab", [], since="defaults", reason="must be a section"),
    *unsupported("logger", "gpu_monitoring.** swanlab.**", "not recorded"),
    renamed("cluster.gpus_per_node", "cluster.workers_per_node"),
    *same("cluster", "num_nodes"),
    *redundant("cluster", "master_port_range_low master_port_range_high", "free ports are chosen automatically"),
    *redundant_if("cluster", "segment_size", [], since=_OFF, reason="Ray places the nodes"),
    *unsupported("", "data_plane.**", "data is sent through Ray's object store"),
    *redundant_if("", " ".join(_SECTIONS), [], since="the section's defaults", reason="must be a section with keys"),
]


def _additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    yield from facts.additions(foreign, native)
    yield from data.additions(foreign, native)


NEMO_RL = Table(
    framework="NeMo RL",
    always=[*_ALWAYS, *rows_for("value", _ALWAYS), *rows_for("teacher", _ALWAYS)],
    switches=[*_SWITCHES, *switches_for("value", _SWITCHES), *switches_for("teacher", _SWITCHES)],
    rows=[
        *_GRPO,
        *PPO,
        *algorithms.DISTILLATION,
        *rows_for("value", POLICY),
        *rows_for("teacher", POLICY),
        *_LOSS,
        *_SUPERVISED,
        *POLICY,
        *_REST,
    ],
    defaults={
        "grpo": {
            "grpo.use_leave_one_out_baseline": True,
            "grpo.num_generations_per_prompt": 16,
            "grpo.adv_estimator.minus_baseline": True,
            "loss_fn.reference_policy_kl_penalty": 0.01,
        },
        "ppo": {
            "ppo.num_generations_per_prompt": 16,
            "ppo.max_num_steps": 100_000,
            "ppo.val_period": 20,
            "ppo.val_at_start": True,
            "ppo.max_val_samples": 256,
            "loss_fn.reference_policy_kl_penalty": 0.01,
        },
        "distillation": algorithms.DEFAULTS,
        "dpo": {"dpo.sft_average_log_probs": False},
        "sft": {},
        "rm": {},
    },
    additions=_additions,
    sections=_SECTIONS,
    native_key="policy.backend",
)
"""The keys of NeMo RL 0.6."""
