"""Expands short forms in a config: `data.train_data_path` means `data.train` with the dataset `jsonl`.

Also has the names that other libraries use for our keys, for suggestions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from rl_core.config.source_tree import KeyPath, Node

if TYPE_CHECKING:
    from rl_core.config.schema import DatasetConfig
    from rl_train.config.schema import DataConfig

DatasetT = TypeVar("DatasetT", bound="DatasetConfig")

MEANINGS = {
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler",
    "warmup_ratio": "scheduler",
    "warmup_steps": "scheduler",
    "batch_size": "train_global_batch_size",
    "per_device_train_batch_size": "train_micro_batch_size",
    "gradient_accumulation_steps": "train_global_batch_size",
    "micro_batch_size": "train_micro_batch_size",
    "per_device_eval_batch_size": "val_batch_size",
    "max_steps": "max_num_steps",
    "num_steps": "max_num_steps",
    "epochs": "max_num_epochs",
    "num_epochs": "max_num_epochs",
    "num_train_epochs": "max_num_epochs",
    "max_length": "max_total_sequence_length",
    "max_seq_length": "max_total_sequence_length",
    "max_prompt_length": "max_input_seq_length",
    "packing": "sequence_packing",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "num_generations": "num_generations_per_prompt",
    "group_size": "num_generations_per_prompt",
    "gradient_checkpointing": "activation_checkpointing",
    "model_path": "model_name",
    "model_name_or_path": "model_name",
    "torch_dtype": "precision",
    "dtype": "precision",
    "bf16": "precision",
    "peft_config": "lora",
    "use_peft": "lora",
    "lora_config": "lora",
    "lora_r": "lora",
    "use_vllm": "backend",
    "vllm_mode": "resources",
    "model_init_kwargs": "hf_cfg",
    "reward_funcs": "reward_fns",
    "beta": "reference_policy_kl_penalty",
    "kl_coef": "reference_policy_kl_penalty",
    "epsilon": "ratio_clip_min",
    "epsilon_high": "ratio_clip_max",
    "delta": "ratio_clip_c",
    "loss_type": "token_level_loss",
    "importance_sampling_level": "sequence_level_importance_ratios",
    "scale_rewards": "normalize_rewards",
    "mask_truncated_completions": "overlong_filtering",
    "assistant_only_loss": "only_unmask_final",
    "log_completions": "num_rollouts_logged",
    "loss_weights": "preference_loss_weight",
    "rpo_alpha": "sft_loss_weight",
    "generation_batch_size": "num_prompts_per_step",
    "steps_per_generation": "train_global_batch_size",
    "metric_for_best_model": "metric_name",
    "load_best_model_at_end": "metric_name",
    "report_to": "loggers",
    "output_dir": "log_dir",
    "logging_dir": "log_dir",
    "save_steps": "save_period",
    "save_total_limit": "keep_latest_k",
    "save_strategy": "save_period",
    "eval_steps": "val_period",
    "eval_strategy": "val_period",
    "evaluation_strategy": "val_period",
}
"""Names of other libraries, and our name for the same setting."""

_DATA_PATHS = {"train_data_path": "train", "val_data_path": "validation"}


def expand_data_paths(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Expands `train_data_path` and `val_data_path` of a section `data` in place; returns each short key and its split.

    Other keys of the split are kept. If the split has a path or another dataset, the short key is unchanged: the model of
    `data` rejects both forms.
    """
    expanded = [
        (short, split) for short, split in _DATA_PATHS.items() if data.get(short) is not None and _has_no_path(data, split)
    ]
    for short, split in expanded:
        data[split] = {**(data.get(split) or {}), "dataset_name": "jsonl", "path": data.pop(short)}
    return expanded


def _has_no_path(data: dict[str, Any], split: str) -> bool:
    given = {} if data.get(split) is None else data[split]
    return isinstance(given, dict) and given.get("path") is None and given.get("dataset_name") in (None, "jsonl")


def expand_aliases(
    values: dict[str, Any], *, written: Node, interpolations: dict[KeyPath, str]
) -> tuple[dict[str, Any], Node, dict[KeyPath, str]]:
    """The config with its short forms expanded; each value keeps the location where the user wrote it.

    Args:
        values: The plain values; changed in place.
        written: The same values with their source locations.
        interpolations: The text of each interpolation, by its path.
    """
    data = values.get("data")
    for short, split in expand_data_paths(data) if isinstance(data, dict) else ():
        section = written.at(("data",))
        if section is not None and isinstance(section.value, dict):
            path = section.value[short]
            given = section.value.get(split)
            others = given.value if given is not None and isinstance(given.value, dict) else {}
            dataset = Node({**others, "path": path}, location=path.key_location, key_location=path.key_location)
            keys = {key: item for key, item in section.value.items() if key != short}
            data_section = Node({**keys, split: dataset}, location=section.location, key_location=section.key_location)
            root = {**written.value, "data": data_section}
            written = Node(root, location=written.location, key_location=written.key_location)
        if ("data", short) in interpolations:
            interpolations["data", split, "path"] = interpolations.pop(("data", short))
    return values, written, interpolations


def with_prompt(section: DatasetT, data: DataConfig) -> DatasetT:
    """A dataset's section, with those keys of `data.prompt` that it does not set itself."""
    if data.prompt is None:
        return section
    given = data.prompt
    defaults = {"prompt": given.prompt_config, "system_prompt": given.system_prompt, "examples_type": given.examples_type}
    if defaults["prompt"] is None and getattr(section, "prompt", None) is None:
        del defaults["examples_type"]  # they belong to a prompt config
    return section.model_copy(
        update={key: value for key, value in defaults.items() if value is not None and getattr(section, key, None) is None}
    )
