"""`rlcore import-config` lists every key of a NeMo RL config once, with its location, and writes a valid rlcore config."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_train.config.loader import load_config
from rlcore_cli.importing.apply import describe, import_config
from rlcore_cli.importing.nemo_rl.table import NEMO_RL
from rlcore_cli.main import app

BASE = """\
policy:
  model_name: acme/small
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 64
  train_micro_batch_size: 4
  logprob_batch_size: ${policy.train_micro_batch_size}
  max_total_sequence_length: 512
  precision: bfloat16
  max_grad_norm: 0.5
  dtensor_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_parallel_size: 1
    lora_cfg: {enabled: false, dim: 8}
  dynamic_batching:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    sequence_length_round: 64
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.98]}
  scheduler:
    - name: torch.optim.lr_scheduler.LinearLR
      kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}
    - name: torch.optim.lr_scheduler.ConstantLR
      kwargs: {factor: 1.0, total_iters: 1000}
    - milestones: [20]
checkpointing:
  enabled: true
  checkpoint_dir: results/run
  save_period: 5
  checkpoint_must_save_by: null
cluster: {gpus_per_node: 2, num_nodes: 1}
logger:
  log_dir: logs
  tensorboard_enabled: true
  wandb_enabled: false
  wandb: {project: sums}
"""

GRPO = """\
defaults: base.yaml
grpo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 8
  max_num_steps: 30
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: true
  adv_estimator:
    name: grpo
    normalize_rewards: ${grpo.normalize_rewards}
    use_leave_one_out_baseline: false
    minus_baseline: true
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
  invented_by_a_fork: 3
loss_fn:
  reference_policy_kl_penalty: 0.02
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  token_level_loss: true
  use_importance_sampling_correction: false
  truncated_importance_sampling_ratio: null
policy:
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    val_temperature: ${.temperature}
    vllm_cfg:
      tensor_parallel_size: 2
      gpu_memory_utilization: 0.7
      max_model_len: ${policy.max_total_sequence_length}
      enforce_eager: true
      use_tqdm: true
    colocated: {enabled: true, resources: {gpus_per_node: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  train: {dataset_name: ResponseDataset, data_path: QUESTIONS, input_key: problem, output_key: answer}
  validation: {dataset_name: ResponseDataset, data_path: QUESTIONS, output_key: answer}
  default: {prompt_file: null, env_name: math, processor: math_hf_data_processor}
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
checkpointing: {metric_name: "val:accuracy", keep_top_k: 3, higher_is_better: true}
"""

SFT = """\
defaults: [base.yaml]
sft:
  max_num_steps: 60
  max_num_epochs: 2
  val_period: 10
  val_batches: 8
  val_global_batch_size: 32
  val_micro_batch_size: 1
  val_at_start: true
  seed: 7
  only_unmask_final: true
data:
  add_bos: true
  train: {dataset_name: ResponseDataset, data_path: QUESTIONS, input_key: problem, output_key: answer, split: train}
  validation: {dataset_name: openai_format, data_path: QUESTIONS, chat_key: problem}
policy:
  dtensor_cfg:
    lora_cfg: {enabled: true, dim: 8, alpha: 32, dropout: 0.0, match_all_linear: true, target_modules: []}
checkpointing: {metric_name: "val:val_loss", higher_is_better: false, keep_top_k: 2}
"""

DPO = """\
defaults: base.yaml
dpo:
  max_num_steps: 150
  val_period: 25
  val_batches: 4
  val_global_batch_size: 8
  reference_policy_kl_penalty: 0.07
  preference_average_log_probs: false
  sft_average_log_probs: ${.preference_average_log_probs}
  preference_loss_weight: 1
  sft_loss_weight: 0.1
data:
  train: {dataset_name: BinaryPreferenceDataset, data_path: QUESTIONS, prompt_key: problem, chosen_key: good}
  validation: {dataset_name: PreferenceDataset, data_path: QUESTIONS}
"""

RM = """\
defaults: base.yaml
rm: {max_num_epochs: 1, max_num_steps: -1, val_period: 16, val_batches: -1, val_global_batch_size: 32}
policy: {reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}}
data:
  train: {dataset_name: BinaryPreferenceDataset, data_path: QUESTIONS}
  validation: {dataset_name: PreferenceDataset, data_path: acme/preferences, split: test}
"""

HUB = """\
defaults: grpo.yaml
data:
  _override_: true
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, seed: "${grpo.seed}"}
  validation: null
  default: {prompt_file: null, env_name: math}
grpo: {seed: 7}
"""

PPO = """\
defaults: shared.yaml
ppo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 2
  max_num_steps: 30
  ppo_epochs: 3
  policy_training_start_step: 5
  val_period: 10
  skip_reference_policy_logprobs_calculation: true
  adv_estimator: {name: gae, gae_lambda: 0.9, gae_gamma: 1, gae_lambda_value: 1.0, length_adaptive_alpha: 0.0}
  async_ppo: {enabled: false, max_trajectory_age_steps: 1}
value_loss_fn: {scale: 1.0, cliprange: 0.3}
value:
  model_name: ${policy.model_name}
  train_global_batch_size: ${policy.train_global_batch_size}
  precision: bfloat16
  reward_model_cfg: {enabled: true, reward_model_type: regression}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, lora_cfg: {enabled: false, dim: 8}}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-5}}
  scheduler:
    - name: torch.optim.lr_scheduler.ConstantLR
      kwargs: {factor: 1.0, total_iters: 1000}
    - milestones: []
"""

MEGATRON = """\
defaults: grpo.yaml
cluster: {gpus_per_node: 8, num_nodes: 2}
policy:
  optimizer: null
  scheduler: null
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    num_layers_in_first_pipeline_stage: 5
    sequence_parallel: true
    activation_checkpointing: true
    recompute_granularity: selective
    pipeline_dtype: ${policy.precision}
    apply_rope_fusion: true
    freeze_moe_router: true
    optimizer:
      optimizer: adam
      lr: 2.0e-6
      min_lr: 2.0e-7
      weight_decay: 0.1
      adam_beta1: 0.9
      adam_beta2: 0.95
      bf16: true
      use_distributed_optimizer: true
      clip_grad: 2.0
    scheduler: {lr_decay_style: cosine, lr_decay_iters: 100, lr_warmup_iters: 10, lr_warmup_init: 0.0}
    distributed_data_parallel_config: {overlap_grad_reduce: true, overlap_param_gather: true}
    peft: {enabled: false, dim: 8}
  generation: {vllm_cfg: {tensor_parallel_size: 4}}
"""

DISTILLATION = """\
defaults: models.yaml
distillation:
  num_prompts_per_step: 32
  max_num_steps: 50
  val_period: 10
  val_at_start: false
  val_batch_size: 16
  max_val_samples: 64
  topk_logits_k: 32
loss_fn: {kl_type: reverse, mixed_kl_weight: 0.5, zero_outside_topk: false}
teacher:
  model_name: acme/large
  tokenizer: {name: acme/large}
  precision: bfloat16
  train_global_batch_size: 64
  logprob_batch_size: 2
  max_total_sequence_length: 512
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0}}
  generation: {backend: vllm, max_new_tokens: 8}
"""

FILES = {"base.yaml": BASE, "grpo.yaml": GRPO, "sft.yaml": SFT, "dpo.yaml": DPO, "rm.yaml": RM, "hub.yaml": HUB}
FILES["shared.yaml"] = GRPO.partition("grpo:\n")[0] + "loss_fn:\n" + GRPO.partition("loss_fn:\n")[2]
FILES |= {"megatron.yaml": MEGATRON, "ppo.yaml": PPO}
FILES["models.yaml"] = "defaults: base.yaml\npolicy:\n" + GRPO.partition("policy:\n")[2]
FILES["distillation.yaml"] = DISTILLATION
NAMES = ["grpo.yaml", "ppo.yaml", "sft.yaml", "dpo.yaml", "rm.yaml", "megatron.yaml", "distillation.yaml"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    questions = folder / "questions.jsonl"
    asked = dict.fromkeys(("problem", "input", "question", "prompt", "context"), "1 + 1")
    answered = {"answer": "2", "expected_answer": "2", "good": "2", "chosen": "2", "rejected": "3"}
    questions.write_text(json.dumps({**asked, **answered}) + "\n")
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("QUESTIONS", str(questions)))
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["import-config", *map(str, arguments)])


def ours_of(folder, tmp_path, name, *overrides):
    """The imported config, validated and loaded."""
    imported = import_config(folder / name, NEMO_RL)
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    return load_config(tmp_path / "ours.yaml", overrides).run, {line.key: line for line in imported.lines}


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [".".join(map(str, path))]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_nemo_rl_config_is_listed_exactly_once(folder, name):
    merged = OmegaConf.create()
    chain = [name]
    while (parent := yaml.safe_load((folder / chain[0]).read_text()).get("defaults")) is not None:
        chain.insert(0, parent[0] if isinstance(parent, list) else parent)
    for file in chain:
        merged = OmegaConf.merge(merged, OmegaConf.load(folder / file))
    merged.pop("defaults", None)
    expected = leaves(OmegaConf.to_container(merged))
    listed = [line.key for line in import_config(folder / name, NEMO_RL).lines if line.location is not None]
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_has_the_source_location_of_its_key(folder, name):
    for line in import_config(folder / name, NEMO_RL).lines:
        if line.location is None:
            assert "(framework default)" in describe(line)
            continue
        written = Path(line.location.file).read_text().splitlines()[line.location.line - 1]
        last = next(part for part in reversed(line.key.split(".")) if not part.isdecimal())
        assert written[line.location.column - 1 :].startswith(last), (line.key, written)


def test_a_grpo_config_keeps_its_meaning(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "grpo.yaml")
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


def test_a_supervised_config_keeps_its_meaning(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "sft.yaml")
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


def test_preference_pairs_are_converted_to_rows(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "dpo.yaml")
    assert (ours.algorithm.global_batch_size, ours.policy.train_micro_batch_size) == (64, 8)
    assert (ours.algorithm.val_batch_size, ours.algorithm.max_val_samples) == (8, 32)
    loss = ours.loss_fn
    assert (loss.name, loss.reference_policy_kl_penalty, loss.sft_loss_weight) == ("dpo", 0.07, 0.1)
    assert not loss.sft_average_log_probs
    assert (ours.data.train.prompt_key, ours.data.train.chosen_key) == ("problem", "good")
    assert ours.data.validation.prompt_key == "context"
    assert lines["policy.train_micro_batch_size"].reason == "counts rows, two per pair"


def test_a_ppo_config_keeps_its_meaning(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "ppo.yaml")
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


def test_a_reward_model_config_keeps_its_meaning(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "rm.yaml")
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


def test_a_distillation_config_keeps_its_meaning(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "distillation.yaml")
    assert (ours.algorithm_name, ours.loss_fn.name) == ("distillation", "distillation")
    algorithm, loss = ours.algorithm, ours.loss_fn
    assert (algorithm.num_prompts_per_step, algorithm.max_num_steps, algorithm.max_val_samples) == (32, 50, 64)
    assert (loss.divergence, loss.topk, loss.beyond_topk) == ("reverse_kl", 32, "renormalize")
    assert (ours.teacher.model_name, ours.teacher.backend, ours.teacher.logprob_batch_size) == ("acme/large", "hf", 2)
    assert ours.teacher.hf_cfg.data_parallel == "fsdp2"
    assert lines["teacher.optimizer.kwargs.lr"].outcome == "redundant"
    assert lines["teacher.generation.max_new_tokens"].outcome == "redundant"
    assert {key for key, line in lines.items() if line.outcome == "unsupported"} == set()


def imported_with(folder, tmp_path, changes, base="grpo.yaml"):
    """A NeMo RL config with some keys changed, imported."""
    tree = {"defaults": str(folder / base)}
    for key, value in changes.items():
        *way, last = key.split(".")
        holder = tree
        for part in way:
            holder = holder.setdefault(part, {})
        holder[last] = value
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tree))
    imported = import_config(tmp_path / "theirs.yaml", NEMO_RL)
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    return imported, {line.key: line for line in imported.lines}


def test_the_chat_template_default_is_the_tokenizers_own(folder, tmp_path):
    imported, lines = imported_with(folder, tmp_path, {"policy.tokenizer.chat_template": "default"})
    assert "chat_template" not in imported.values["policy"]["tokenizer"]
    assert lines["policy.tokenizer.chat_template"].outcome == "redundant"


def test_a_null_chat_template_concatenates_the_contents_of_the_messages(folder, tmp_path):
    import jinja2

    imported, lines = imported_with(folder, tmp_path, {"policy.tokenizer.chat_template": None})
    template = imported.values["policy"]["tokenizer"]["chat_template"]
    messages = [{"role": "user", "content": "1 + 1 = "}, {"role": "assistant", "content": "2"}]
    assert jinja2.Template(template).render(messages=messages) == "1 + 1 = 2"
    assert "no template" in lines["policy.tokenizer.chat_template"].reason
    load_config(tmp_path / "ours.yaml")


def test_switches_in_the_env_section_are_not_tasks(folder, tmp_path):
    changes = {"env.should_use_nemo_gym": True, "env.should_log_nemo_gym_responses": False}
    imported, lines = imported_with(folder, tmp_path, changes)
    assert set(imported.values["env"]) == {"math"}
    assert lines["env.should_use_nemo_gym"].outcome == "unsupported"
    load_config(tmp_path / "ours.yaml")


def test_the_import_adds_require_box_to_math_environments(folder, tmp_path):
    imported, _ = imported_with(folder, tmp_path, {})
    [added] = [one for one in imported.added if one.key == "env.math.require_box"]
    assert added.value is True
    assert "without a box" in added.reason
    assert load_config(tmp_path / "ours.yaml").run.env["math"].require_box


def test_references_to_environment_variables_stay_references(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_FOLDER", raising=False)
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    changes = {
        "checkpointing.checkpoint_dir": "${oc.env:NO_SUCH_FOLDER}/checkpoints",
        "logger.log_dir": "${checkpointing.checkpoint_dir}/logs",
        "logger.wandb_enabled": True,
        "logger.wandb.project": "${oc.env:SECRET_TOKEN}",
        "logger.wandb.name": "${oc.env:NO_SUCH_NAME,trial}",
    }
    imported, _ = imported_with(folder, tmp_path, changes)
    text = imported.to_yaml()
    assert "hunter2" not in text
    assert imported.values["checkpointing"]["checkpoint_dir"] == "${oc.env:NO_SUCH_FOLDER}/checkpoints"
    assert imported.values["logger"]["log_dir"] == "${oc.env:NO_SUCH_FOLDER}/checkpoints/logs"
    monkeypatch.setenv("NO_SUCH_FOLDER", str(tmp_path))
    ours = load_config(tmp_path / "ours.yaml").run
    assert str(ours.logger.log_dir) == f"{tmp_path}/checkpoints/logs"
    assert (ours.logger.loggers["wandb"].project, ours.logger.loggers["wandb"].name) == ("hunter2", "trial")


def test_an_rlcore_config_is_rejected(tmp_path):
    (tmp_path / "ours.yaml").write_text("grpo: {max_num_steps: 3}\npolicy: {backend: hf, model_name: acme/small}\n")
    with pytest.raises(ConfigError, match=r"is already an rlcore config: it sets policy\.backend"):
        import_config(tmp_path / "ours.yaml", NEMO_RL)


def test_the_defaults_of_ppo_are_written_out(tmp_path):
    (tmp_path / "theirs.yaml").write_text("ppo: {seed: 1}\npolicy: {model_name: acme/small}\n")
    imported = import_config(tmp_path / "theirs.yaml", NEMO_RL)
    assert imported.values["ppo"]["num_generations_per_prompt"] == 16
    assert imported.values["loss_fn"]["reference_policy_kl_penalty"] == 0.01


def test_reinforce_plus_plus_subtracts_the_group_mean_by_default(folder, tmp_path):
    (tmp_path / "theirs.yaml").write_text("grpo: {adv_estimator: {name: reinforce_plus_plus}}\npolicy: {model_name: a/b}\n")
    imported = import_config(tmp_path / "theirs.yaml", NEMO_RL)
    assert imported.values["grpo"]["adv_estimator"]["minus_baseline"] is True


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
def test_a_key_whose_meaning_differs_has_a_note(folder, tmp_path, changes, key, note):
    _, lines = imported_with(folder, tmp_path, changes)
    line = lines[key or next(iter(changes))]
    assert line.outcome == "renamed"
    assert note in line.reason


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_estimator_that_is_wrong_in_the_reward_is_replaced_by_k1(folder, tmp_path, estimator):
    changes = {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_type": estimator}
    imported, lines = imported_with(folder, tmp_path, changes)
    assert imported.values["loss_fn"]["use_kl_in_reward"] is True
    assert "reference_policy_kl_type" not in imported.values["loss_fn"]
    line = lines["loss_fn.reference_policy_kl_type"]
    assert line.outcome == "unsupported"
    assert "k1 is used" in line.reason


def test_a_named_dataset_and_a_held_out_fraction_are_imported(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "hub.yaml")
    train = ours.data.train
    assert (train.dataset_name, train.path, train.split) == ("huggingface", "nvidia/OpenMathInstruct-2", "train_1M")
    assert (train.input_key, train.output_key, train.task_name) == ("problem", "expected_answer", "math")
    assert (ours.data.split.validation, ours.data.split.seed) == (0.05, 7)
    assert ours.algorithm.val_period == 10
    assert lines["data.train.split_validation_size"].targets == ("data.split.validation",)


def test_dataset_keys_in_the_old_layout_say_where_to_move_them(tmp_path):
    older = {"dataset_name": "OpenMathInstruct-2", "prompt_file": "cot.txt"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"grpo": {}, "data": older}))
    lines = import_config(tmp_path / "theirs.yaml", NEMO_RL).lines
    listed = {line.key: line for line in lines if line.key.startswith("data.")}
    assert listed.keys() == {"data.dataset_name", "data.prompt_file"}
    assert all(line.outcome == "unsupported" and "move it to data.train" in line.reason for line in listed.values())


def test_each_key_of_several_datasets_is_unsupported(tmp_path):
    several = [{"dataset_name": "ResponseDataset", "data_path": "a.jsonl"}, {"dataset_name": "gsm8k"}]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"grpo": {}, "data": {"train": several}}))
    lines = import_config(tmp_path / "theirs.yaml", NEMO_RL).lines
    listed = {line.key: line.reason for line in lines if line.key.startswith("data.train")}
    assert sorted(listed) == ["data.train.0.data_path", "data.train.0.dataset_name", "data.train.1.dataset_name"]
    assert all("data.mix" in reason for reason in listed.values())


def test_a_megatron_config_keeps_its_parallelism_and_its_optimizer(folder, tmp_path):
    ours, lines = ours_of(folder, tmp_path, "megatron.yaml")
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
        ("checkpointing.metric_name", "val:validation-easy_loss", {"checkpointing.metric_name": "validation/loss"}),
        ("checkpointing.checkpoint_must_save_by", "01:03:45:00", {"checkpointing.max_time": "1-03:45:00"}),
        ("checkpointing.checkpoint_must_save_by", 3600, {"checkpointing.max_time": 3600}),
        ("logger.wandb_enabled", True, {"logger.loggers.wandb.enabled": True}),
    ],
)
def test_values_that_need_a_conversion_are_converted(folder, tmp_path, key, value, ours):
    holder = value
    for part in reversed(key.split(".")):
        holder = {part: holder}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"defaults": str(folder / "grpo.yaml"), **holder}))
    imported = import_config(tmp_path / "theirs.yaml", NEMO_RL)
    [line] = [line for line in imported.lines if line.key == key]
    assert getattr(line.decision, "values", {}) == ours
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    load_config(tmp_path / "ours.yaml")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("grpo.async_grpo.enabled", "true", "newest weights"),
        ("policy.dtensor_cfg.tensor_parallel_size", "2", "FSDP2"),
        ("policy.generation.top_p", "0.9", "filtered"),
        ("policy.generation.backend", "sglang", "no generation backend 'sglang'"),
        ("policy.generation.val_temperature", "0.6", "training temperature"),
        ("grpo.adv_estimator.name", "opd", "gdpo"),
        ("loss_fn.positive_example_nll_weight", "0.1", "likelihood"),
        ("policy.megatron_cfg.enabled", "maybe", "another policy backend"),
        ("checkpointing.metric_name", "val:pass_k", "docs/metrics.md"),
        ("data.train.dataset_name", "squad", "JSON lines"),
        ("data.train.data_path", "rows.csv", "not supported"),
        ("data.train.split_validation_size", "0.05", "data.validation"),
        ("distillation.topk_logits_k", "64", "a separate file"),
        ("logger.monitor_gpus", "true", "GPUs"),
    ],
)
def test_unsupported_and_redundant_keys_are_listed_with_their_reason(folder, tmp_path, key, value, says):
    holder = yaml.safe_load(value)
    for part in reversed(key.split(".")):
        holder = {part: holder}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"defaults": str(folder / "grpo.yaml"), **holder}))
    [line] = [line for line in import_config(tmp_path / "theirs.yaml", NEMO_RL).lines if line.key == key]
    assert says in line.reason
    assert line.outcome == ("redundant" if value == "maybe" else "unsupported")
    assert line.targets == ()


def test_the_command_writes_the_config_lists_all_keys_and_reports_that_it_is_valid(folder, tmp_path):
    result = run(folder / "grpo.yaml", "--output", tmp_path / "ours.yaml")
    assert result.exit_code == 0, result.output
    assert "ours.yaml passes `rlcore validate`" in result.stdout
    [line] = [line for line in result.stdout.splitlines() if " grpo.invented_by_a_fork" in line]
    assert re.search(r"grpo\.yaml:16:3  grpo\.invented_by_a_fork = 3: unknown NeMo RL key", line)
    assert CliRunner().invoke(app, ["validate", str(tmp_path / "ours.yaml")]).exit_code == 0


def test_without_an_output_file_the_config_is_written_to_standard_output_and_the_list_to_standard_error(folder):
    result = run(folder / "dpo.yaml")
    assert set(yaml.safe_load(result.stdout)) == {"dpo", "loss_fn", "policy", "data", "cluster", "checkpointing", "logger"}
    assert "kept (" in result.stderr


def test_validation_errors_of_the_new_config_are_listed(folder, tmp_path):
    (tmp_path / "theirs.yaml").write_text(f"defaults: {folder}/sft.yaml\ndata: {{train: {{dataset_name: squad}}}}\n")
    (tmp_path / "open.yaml").write_text(f"defaults: {folder}/sft.yaml\ndata: {{train: {{data_path: '???'}}}}\n")
    for name in ("theirs.yaml", "open.yaml"):
        result = run(tmp_path / name, "--json")
        assert result.exit_code == 0
        listed = json.loads(result.stdout)
        assert listed["config"]["data"]["train"]["path"] == "???"
        assert [error.partition(":")[0] for error in listed["errors"]] == ["data.train.path"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist"),
        ("grpo: [1, 2\n", "theirs.yaml:2"),
        ("- grpo\n- sft\n", "must be a mapping of sections"),
        ("", "but has none"),
        ("trainer: {steps: 3}\n", "but has trainer"),
        ("grpo: {seed: '${nowhere.to.be.found}'}\n", "there is no key 'nowhere.to.be.found'"),
        ("defaults: gone.yaml\ngrpo: {}\n", "gone.yaml"),
    ],
)
def test_a_file_that_is_not_a_nemo_rl_config_is_a_user_error(tmp_path, text, says):
    path = tmp_path / "theirs.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_config(path, NEMO_RL)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
    assert isinstance(run(path).exception, ConfigError)


def test_an_existing_output_file_is_not_overwritten(folder, tmp_path):
    (tmp_path / "ours.yaml").write_text("precious\n")
    assert isinstance(run(folder / "sft.yaml", "--output", tmp_path / "ours.yaml").exception, ConfigError)
    assert (tmp_path / "ours.yaml").read_text() == "precious\n"


ODD = st.sampled_from([None, True, False, 0, -1, 3, 0.5, "", "text", "???", [], [1], [{}], [{"a": 1}], {}, {"a": {"b": 1}}])


@pytest.fixture(scope="module")
def known(folder):
    return [line.key for name in (*NAMES, "hub.yaml") for line in import_config(folder / name, NEMO_RL).lines]


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_of_any_type_are_listed_without_a_traceback(known, tmp_path, data):
    theirs = {}
    for key in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=8, unique=True)):
        *way, last = [part for part in key.split(".") if not part.isdecimal()]
        holder = theirs
        for part in way:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else {}
        if isinstance(holder, dict):
            holder[last] = data.draw(ODD)
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(theirs))
    imported = import_config(tmp_path / "odd.yaml", NEMO_RL)
    assert sorted(line.key for line in imported.lines if line.location is not None) == sorted(leaves(theirs))
    assert (yaml.safe_load(imported.to_yaml()) or {}).keys() == imported.values.keys()
