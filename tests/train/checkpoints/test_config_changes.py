"""Config changes that a resume allows, and those that make it a different run."""

from rl_train.checkpoints.config_changes import config_changes

OLD = {
    "grpo": {"max_num_steps": 10, "seed": 1},
    "policy": {"model_name": "a", "logprob_batch_size": 4},
    "logger": {"log_dir": "x"},
}


def changed(section, key, value):
    new = {name: dict(values) for name, values in OLD.items()}
    new[section][key] = value
    return config_changes(OLD, new, "grpo")


def test_length_and_location_may_change_on_resume():
    assert changed("grpo", "max_num_steps", 20) == {}
    assert changed("logger", "log_dir", "y") == {}
    assert changed("policy", "logprob_batch_size", 8) == {}


def test_every_setting_of_validation_may_change_on_resume():
    old = {"grpo": {"max_val_samples": None, "val_period": 5}, "policy": {"generation": {"val_temperature": 0.0}}}
    new = {"grpo": {"max_val_samples": 8, "val_period": 2}, "policy": {"generation": {"val_temperature": 1.0}}}
    assert config_changes(old, new, "grpo") == {}


def test_another_model_or_seed_is_another_run():
    assert changed("policy", "model_name", "b") == {"policy.model_name": ("a", "b")}
    assert changed("grpo", "seed", 2) == {"grpo.seed": (1, 2)}


def test_a_new_key_counts_as_a_config_change():
    assert changed("grpo", "num_prompts_per_step", 4) == {"grpo.num_prompts_per_step": (None, 4)}
