"""NeMo RL configs for the tests of `rlcore import-config`, and functions that import them."""

import json

import yaml
from typer.testing import CliRunner

from rl_train.config.loader import load_config
from rlcore_cli.importing.apply import import_config
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
"""One config of each algorithm."""


def write_configs(folder):
    """Write all configs, with a data file that every one of them can read."""
    questions = folder / "questions.jsonl"
    asked = dict.fromkeys(("problem", "input", "question", "prompt", "context"), "1 + 1")
    answered = {"answer": "2", "expected_answer": "2", "good": "2", "chosen": "2", "rejected": "3"}
    questions.write_text(json.dumps({**asked, **answered}) + "\n")
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("QUESTIONS", str(questions)))


def run(*arguments):
    """`rlcore import-config` in this process."""
    return CliRunner().invoke(app, ["import-config", *map(str, arguments)])


def ours_of(folder, tmp_path, name, *overrides):
    """The imported config, validated and loaded."""
    imported = import_config(folder / name)
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    return load_config(tmp_path / "ours.yaml", overrides).run, {line.key: line for line in imported.lines}


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
    imported = import_config(tmp_path / "theirs.yaml")
    (tmp_path / "ours.yaml").write_text(imported.to_yaml())
    return imported, {line.key: line for line in imported.lines}


def leaves(value, path=()):
    """The keys of all values in nested mappings, and in lists of mappings."""
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [".".join(map(str, path))]
