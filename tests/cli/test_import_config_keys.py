"""`rlcore import-config` converts single keys of NeMo RL, or says why it cannot: data, environments, values, notes."""

import pytest
import yaml
from nemo_rl_configs import imported_with, ours_of

from rl_train.config.loader import load_config
from rlcore_cli.importing.apply import import_config


def test_a_named_dataset_and_a_held_out_fraction_are_imported(nemo_rl, tmp_path):
    ours, lines = ours_of(nemo_rl, tmp_path, "hub.yaml")
    train = ours.data.train
    assert (train.dataset_name, train.path, train.split) == ("huggingface", "nvidia/OpenMathInstruct-2", "train_1M")
    assert (train.input_key, train.output_key, train.task_name) == ("problem", "expected_answer", "math")
    assert (ours.data.split.validation, ours.data.split.seed) == (0.05, 7)
    assert ours.algorithm.val_period == 10
    assert lines["data.train.split_validation_size"].targets == ("data.split.validation",)


def test_dataset_keys_in_the_old_layout_say_where_to_move_them(tmp_path):
    older = {"dataset_name": "OpenMathInstruct-2", "prompt_file": "cot.txt"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"grpo": {}, "data": older}))
    lines = import_config(tmp_path / "theirs.yaml").lines
    listed = {line.key: line for line in lines if line.key.startswith("data.")}
    assert listed.keys() == {"data.dataset_name", "data.prompt_file"}
    assert all(line.outcome == "unsupported" and "move it to data.train" in line.reason for line in listed.values())


def test_each_key_of_several_datasets_is_unsupported(tmp_path):
    several = [{"dataset_name": "ResponseDataset", "data_path": "a.jsonl"}, {"dataset_name": "gsm8k"}]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"grpo": {}, "data": {"train": several}}))
    lines = import_config(tmp_path / "theirs.yaml").lines
    listed = {line.key: line.reason for line in lines if line.key.startswith("data.train")}
    assert sorted(listed) == ["data.train.0.data_path", "data.train.0.dataset_name", "data.train.1.dataset_name"]
    assert all("data.mix" in reason for reason in listed.values())


def test_the_chat_template_default_is_the_tokenizers_own(nemo_rl, tmp_path):
    imported, lines = imported_with(nemo_rl, tmp_path, {"policy.tokenizer.chat_template": "default"})
    assert "chat_template" not in imported.values["policy"]["tokenizer"]
    assert lines["policy.tokenizer.chat_template"].outcome == "redundant"


def test_a_null_chat_template_concatenates_the_contents_of_the_messages(nemo_rl, tmp_path):
    import jinja2

    imported, lines = imported_with(nemo_rl, tmp_path, {"policy.tokenizer.chat_template": None})
    template = imported.values["policy"]["tokenizer"]["chat_template"]
    messages = [{"role": "user", "content": "1 + 1 = "}, {"role": "assistant", "content": "2"}]
    assert jinja2.Template(template).render(messages=messages) == "1 + 1 = 2"
    assert "no template" in lines["policy.tokenizer.chat_template"].reason
    load_config(tmp_path / "ours.yaml")


def test_switches_in_the_env_section_are_not_tasks(nemo_rl, tmp_path):
    changes = {"env.should_use_nemo_gym": True, "env.should_log_nemo_gym_responses": False}
    imported, lines = imported_with(nemo_rl, tmp_path, changes)
    assert set(imported.values["env"]) == {"math"}
    assert lines["env.should_use_nemo_gym"].outcome == "unsupported"
    load_config(tmp_path / "ours.yaml")


def test_the_import_adds_require_box_to_math_environments(nemo_rl, tmp_path):
    imported, _ = imported_with(nemo_rl, tmp_path, {})
    [added] = [one for one in imported.added if one.key == "env.math.require_box"]
    assert added.value is True
    assert "without a box" in added.reason
    assert load_config(tmp_path / "ours.yaml").run.env["math"].require_box


def test_references_to_environment_variables_stay_references(nemo_rl, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_FOLDER", raising=False)
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    changes = {
        "checkpointing.checkpoint_dir": "${oc.env:NO_SUCH_FOLDER}/checkpoints",
        "logger.log_dir": "${checkpointing.checkpoint_dir}/logs",
        "logger.wandb_enabled": True,
        "logger.wandb.project": "${oc.env:SECRET_TOKEN}",
        "logger.wandb.name": "${oc.env:NO_SUCH_NAME,trial}",
    }
    imported, _ = imported_with(nemo_rl, tmp_path, changes)
    text = imported.to_yaml()
    assert "hunter2" not in text
    assert imported.values["checkpointing"]["checkpoint_dir"] == "${oc.env:NO_SUCH_FOLDER}/checkpoints"
    assert imported.values["logger"]["log_dir"] == "${oc.env:NO_SUCH_FOLDER}/checkpoints/logs"
    monkeypatch.setenv("NO_SUCH_FOLDER", str(tmp_path))
    ours = load_config(tmp_path / "ours.yaml").run
    assert str(ours.logger.log_dir) == f"{tmp_path}/checkpoints/logs"
    assert (ours.logger.loggers["wandb"].project, ours.logger.loggers["wandb"].name) == ("hunter2", "trial")


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"grpo.adv_estimator.use_leave_one_out_baseline": True}, None, "standard deviation of the whole group"),
        ({"grpo.use_dynamic_sampling": True}, None, "before scaling and shaping"),
        (
            {"grpo.reward_shaping": {"enabled": True, "overlong_buffer_penalty": 1.0}},
            "grpo.reward_shaping.overlong_buffer_penalty",
            "bounds",
        ),
        ({"loss_fn.reference_policy_kl_penalty": 0.02}, None, "score-function term"),
        ({"loss_fn.use_kl_in_reward": True}, None, "the KL estimator in the reward is k1"),
        ({"loss_fn.use_importance_sampling_correction": True}, None, "truncated at 2.0"),
        (
            {
                "loss_fn.sequence_level_importance_ratios": True,
                "loss_fn.token_level_loss": False,
                "loss_fn.use_importance_sampling_correction": True,
            },
            "loss_fn.use_importance_sampling_correction",
            "one per sequence",
        ),
    ],
)
def test_a_key_whose_meaning_differs_has_a_note(nemo_rl, tmp_path, changes, key, note):
    _, lines = imported_with(nemo_rl, tmp_path, changes)
    line = lines[key or next(iter(changes))]
    assert line.outcome == "renamed"
    assert note in line.reason


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_estimator_that_is_wrong_in_the_reward_is_replaced_by_k1(nemo_rl, tmp_path, estimator):
    changes = {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_type": estimator}
    imported, lines = imported_with(nemo_rl, tmp_path, changes)
    assert imported.values["loss_fn"]["use_kl_in_reward"] is True
    assert "reference_policy_kl_type" not in imported.values["loss_fn"]
    line = lines["loss_fn.reference_policy_kl_type"]
    assert line.outcome == "unsupported"
    assert "k1 is used" in line.reason


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("grpo.val_period", -1, {"grpo.val_period": 0}),
        ("grpo.max_num_epochs", -1, {}),
        ("policy.max_grad_norm", 0.0, {"policy.max_grad_norm": None}),
        ("policy.generation.vllm_kwargs.max_num_seqs", 64, {"policy.generation.vllm_cfg.max_num_seqs": 64}),
        (
            "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
            3 << 29,
            {"policy.generation.vllm_cfg.kv_cache_gib": 1.5},
        ),
        ("policy.generation.vllm_kwargs.enable_chunked_prefill", True, {}),
        ("loss_fn.force_on_policy_ratio", True, {"grpo.skip_logprobs_when_on_policy": True}),
        ("loss_fn.reference_policy_kl_type", "k2", {"loss_fn.reference_policy_kl_type": "k2"}),
        ("checkpointing.metric_name", "val:reward", {"checkpointing.metric_name": "validation/reward"}),
        ("checkpointing.checkpoint_must_save_by", "01:03:45:00", {"checkpointing.max_time": "1-03:45:00"}),
        ("checkpointing.checkpoint_must_save_by", 3600, {"checkpointing.max_time": 3600}),
        ("logger.wandb_enabled", True, {"logger.loggers.wandb.enabled": True}),
    ],
)
def test_values_that_need_a_conversion_are_converted(nemo_rl, tmp_path, key, value, ours):
    holder = value
    for part in reversed(key.split(".")):
        holder = {part: holder}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"defaults": str(nemo_rl / "grpo.yaml"), **holder}))
    imported = import_config(tmp_path / "theirs.yaml")
    [line] = [line for line in imported.lines if line.key == key]
    assert getattr(line.decision, "values", {}) == ours
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    load_config(tmp_path / "ours.yaml")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("grpo.async_grpo.enabled", "true", "rollout.max_staleness"),
        ("policy.dtensor_cfg.tensor_parallel_size", "2", "FSDP2"),
        ("policy.generation.top_p", "0.9", "only the engine hf"),
        ("policy.generation.backend", "sglang", "no generation backend 'sglang'"),
        ("policy.generation.val_temperature", "0.6", "training temperature"),
        ("grpo.adv_estimator.name", "opd", "gdpo"),
        ("loss_fn.positive_example_nll_weight", "0.1", "likelihood"),
        ("policy.megatron_cfg.enabled", "maybe", "another policy backend"),
        ("checkpointing.metric_name", "val:pass_k", "docs/metrics.md"),
        ("checkpointing.metric_name", "val:validation-easy_loss", "grpo does not write validation/loss"),
        ("data.train.dataset_name", "squad", "JSON lines"),
        ("data.train.data_path", "rows.csv", "not supported"),
        ("data.train.split_validation_size", "0.05", "data.validation"),
        ("distillation.topk_logits_k", "64", "a separate file"),
        ("logger.monitor_gpus", "true", "GPUs"),
    ],
)
def test_unsupported_and_redundant_keys_are_listed_with_their_reason(nemo_rl, tmp_path, key, value, says):
    holder = yaml.safe_load(value)
    for part in reversed(key.split(".")):
        holder = {part: holder}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"defaults": str(nemo_rl / "grpo.yaml"), **holder}))
    [line] = [line for line in import_config(tmp_path / "theirs.yaml").lines if line.key == key]
    assert says in line.reason
    assert line.outcome == ("redundant" if value == "maybe" else "unsupported")
    assert line.targets == ()
