"""A NeMo RL config of each algorithm and of Megatron keeps its meaning as an rlcore config."""

import pytest
from nemo_rl_configs import imported_with, ours_of

from rl_train.config.loader import load_config
from rlcore_cli.importing.apply import import_config


def test_a_grpo_config_keeps_its_meaning(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "grpo.yaml")
    assert ours.algorithm_name == "grpo"
    assert (ours.algorithm.num_prompts_per_step, ours.algorithm.num_generations_per_prompt) == (8, 8)
    assert ours.algorithm.adv_estimator.normalizes
    assert not ours.algorithm.adv_estimator.leaves_one_out
    assert (ours.loss_fn.name, ours.loss_fn.ratio_clip_max, ours.loss_fn.reference_policy_kl_penalty) == (
        "clipped_pg",
        0.28,
        0.02,
    )
    policy = ours.policy
    assert (policy.backend, policy.hf_cfg.data_parallel, policy.precision) == ("hf", "fsdp2", "bfloat16")
    assert policy.dynamic_batching.train_mb_tokens == 512 * 4
    assert policy.activation_checkpointing
    assert policy.optimizer.kwargs == {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.98]}
    assert policy.scheduler.name == "torch.optim.lr_scheduler.LinearLR"
    assert policy.scheduler.kwargs == {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 20}
    assert policy.generation.max_new_tokens == 511
    assert policy.generation.val_temperature == 1.0
    assert (policy.generation.num_workers, policy.generation.vllm_cfg.tensor_parallel_size) == (1, 2)
    assert (ours.cluster.workers_per_node, ours.cluster.num_nodes) == (2, 1)
    assert (ours.data.train.input_key, ours.data.train.output_key, ours.data.train.task_name) == ("problem", "answer", "math")
    assert ours.data.validation.input_key == "input"
    assert ours.env["math"].num_workers == 8
    assert (ours.checkpointing.metric_name, ours.checkpointing.keep_top_k) == ("validation/accuracy", 3)
    assert list(ours.logger.loggers) == ["tensorboard"]
    assert lines["grpo.num_prompts_per_step"].outcome == "kept"
    assert lines["cluster.gpus_per_node"].outcome == "renamed"
    assert lines["grpo.async_grpo.max_trajectory_age_steps"].outcome == "redundant"
    assert lines["grpo.invented_by_a_fork"].outcome == "unsupported"
    assert {key for key, line in lines.items() if line.outcome == "unsupported"} == {"grpo.invented_by_a_fork"}


def test_a_supervised_config_keeps_its_meaning(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "sft.yaml")
    assert (ours.algorithm.max_num_steps, ours.algorithm.max_num_epochs, ours.algorithm.seed) == (60, 2, 7)
    assert (ours.algorithm.global_batch_size, ours.policy.train_global_batch_size) == (64, None)
    assert (ours.algorithm.val_batch_size, ours.algorithm.max_val_samples) == (32, 256)
    assert ours.algorithm.only_unmask_final
    assert (ours.data.train.response_key, ours.data.train.output_key) == ("answer", None)
    assert ours.data.validation.input_key == "problem"
    lora = ours.policy.hf_cfg.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32, "all-linear")
    assert ours.policy.hf_cfg.data_parallel == "replicate"
    assert ours.checkpointing.metric_name == "validation/loss"
    assert lines["data.add_bos"].outcome == "unsupported"


def test_adapters_of_megatron_are_those_of_the_same_layers(nemo_rl, tmp_path):
    peft = {"enabled": True, "dim": 8, "alpha": 16, "dropout": 0.0, "exclude_modules": [], "lora_A_init_method": "xavier"}
    layers = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    changes = {"policy.megatron_cfg.peft": {**peft, "target_modules": layers}}
    imported_with(nemo_rl, tmp_path, changes, base="megatron.yaml")
    lora = load_config(tmp_path / "ours.yaml").run.policy.megatron_cfg.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16, "all-linear")
    changes = {"policy.megatron_cfg.peft": {**peft, "target_modules": layers[:1], "dropout": 0.1}}
    _, lines = imported_with(nemo_rl, tmp_path, changes, base="megatron.yaml")
    unsupported = {key for key, line in lines.items() if line.outcome == "unsupported" and ".peft." in key}
    assert unsupported == {"policy.megatron_cfg.peft.target_modules", "policy.megatron_cfg.peft.dropout"}


def test_preference_pairs_are_converted_to_rows(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "dpo.yaml")
    assert (ours.algorithm.global_batch_size, ours.policy.train_micro_batch_size) == (64, 8)
    assert (ours.algorithm.val_batch_size, ours.algorithm.max_val_samples) == (8, 32)
    loss = ours.loss_fn
    assert (loss.name, loss.reference_policy_kl_penalty, loss.sft_loss_weight) == ("dpo", 0.07, 0.1)
    assert not loss.sft_average_log_probs
    assert (ours.data.train.prompt_key, ours.data.train.chosen_key) == ("problem", "good")
    assert ours.data.validation.prompt_key == "context"
    assert lines["policy.train_micro_batch_size"].reason == "counts rows, two per pair"


def test_a_ppo_config_keeps_its_meaning(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "ppo.yaml")
    assert (ours.algorithm_name, ours.loss_fn.name) == ("ppo", "clipped_pg")
    assert (ours.algorithm.ppo_epochs, ours.algorithm.critic_warmup_steps) == (3, 5)
    gae = ours.algorithm.gae
    assert (gae.lam, gae.gamma, gae.value_lam, gae.length_adaptive_alpha) == (0.9, 1.0, 1.0, None)
    assert ours.algorithm.value_loss.cliprange_value == 0.3
    assert (ours.value.backend, ours.value.model_name, ours.value.hf_cfg.data_parallel) == ("hf", "acme/small", "fsdp2")
    assert (ours.value.train_global_batch_size, ours.value.scheduler) == (64, None)
    assert ours.value.optimizer.kwargs == {"lr": 1.0e-5, "weight_decay": 0.0}
    assert lines["value.megatron_cfg.tensor_model_parallel_size"].reason == "value.megatron_cfg.enabled is disabled"
    assert {key for key, line in lines.items() if line.outcome == "unsupported"} == set()


def test_a_reward_model_config_keeps_its_meaning(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "rm.yaml")
    assert (ours.algorithm_name, ours.loss_fn.name) == ("rm", "bradley_terry")
    assert (ours.algorithm.max_num_epochs, ours.algorithm.max_num_steps) == (1, 1_000_000)
    assert (ours.algorithm.global_batch_size, ours.policy.train_micro_batch_size) == (64, 8)
    validation = ours.data.validation
    assert (validation.dataset_name, validation.path, validation.split) == (
        "preference_huggingface",
        "acme/preferences",
        "test",
    )
    assert {key for key, line in lines.items() if line.outcome == "unsupported"} == set()


def test_a_distillation_config_keeps_its_meaning(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "distillation.yaml")
    assert (ours.algorithm_name, ours.loss_fn.name) == ("distillation", "distillation")
    algorithm, loss = ours.algorithm, ours.loss_fn
    assert (algorithm.num_prompts_per_step, algorithm.max_num_steps, algorithm.max_val_samples) == (32, 50, 64)
    assert (loss.divergence, loss.topk, loss.beyond_topk) == ("reverse_kl", 32, "renormalize")
    assert (ours.teacher.model_name, ours.teacher.backend, ours.teacher.logprob_batch_size) == ("acme/large", "hf", 2)
    assert ours.teacher.hf_cfg.data_parallel == "fsdp2"
    assert lines["teacher.optimizer.kwargs.lr"].outcome == "redundant"
    assert lines["teacher.generation.max_new_tokens"].outcome == "redundant"
    assert {key for key, line in lines.items() if line.outcome == "unsupported"} == set()


def test_a_megatron_config_keeps_its_parallelism_and_its_optimizer(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "megatron.yaml")
    megatron = ours.policy.megatron_cfg
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (4, 2)
    assert (megatron.sequence_parallel, megatron.num_layers_in_first_pipeline_stage) == (True, 5)
    assert (megatron.recompute_granularity, ours.policy.activation_checkpointing) == ("selective", False)
    assert (megatron.use_distributed_optimizer, megatron.overlap_param_gather) == (True, True)
    assert ours.policy.optimizer.kwargs == {"lr": 2.0e-6, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert ours.policy.scheduler.name == "cosine"
    assert ours.policy.scheduler.kwargs == {
        "num_warmup_steps": 10,
        "num_training_steps": 100,
        "min_lr_ratio": pytest.approx(0.1),
    }
    assert ours.policy.max_grad_norm == 2.0
    assert ours.policy.generation.num_workers == 4
    assert lines["policy.dtensor_cfg.enabled"].outcome == "redundant"
    refused = {key for key, line in lines.items() if line.outcome == "unsupported"}
    at = "policy.megatron_cfg"
    assert refused == {"grpo.invented_by_a_fork", f"{at}.freeze_moe_router", f"{at}.scheduler.lr_warmup_init"}


def test_muon_of_megatron_is_unsupported_with_the_keys_to_set_instead(nemo_rl, tmp_path):
    section = "{optimizer: dist_muon, muon_momentum: 0.95, adam_beta1: 0.9}"
    (tmp_path / "theirs.yaml").write_text(
        f"defaults: {nemo_rl / 'megatron.yaml'}\npolicy: {{megatron_cfg: {{optimizer: {section}}}}}\n"
    )
    lines = {line.key: line for line in import_config(tmp_path / "theirs.yaml").lines}
    for key in ("optimizer", "muon_momentum"):
        line = lines[f"policy.megatron_cfg.optimizer.{key}"]
        assert (line.outcome, line.reason) == ("unsupported", "Muon needs policy.backend hf and policy.optimizer.groups")
    assert lines["policy.megatron_cfg.optimizer.adam_beta1"].outcome == "redundant"


def test_the_defaults_of_ppo_are_written_out(tmp_path):
    (tmp_path / "theirs.yaml").write_text("ppo: {seed: 1}\npolicy: {model_name: acme/small}\n")
    imported = import_config(tmp_path / "theirs.yaml")
    assert imported.values["ppo"]["num_generations_per_prompt"] == 16
    assert imported.values["loss_fn"]["reference_policy_kl_penalty"] == 0.01


def test_reinforce_plus_plus_subtracts_the_group_mean_by_default(nemo_rl, tmp_path):
    (tmp_path / "theirs.yaml").write_text("grpo: {adv_estimator: {name: reinforce_plus_plus}}\npolicy: {model_name: a/b}\n")
    imported = import_config(tmp_path / "theirs.yaml")
    assert imported.values["grpo"]["adv_estimator"]["minus_baseline"] is True
