"""Config changes that a resume allows, and those that make it a different run."""

import re

import pytest

from rl_core.errors import CheckpointError
from rl_train.checkpoints.inputs import ROWS, ComparedConfig

OLD = {
    "grpo": {"max_num_steps": 10, "seed": 1},
    "policy": {"model_name": "a", "logprob_batch_size": 4},
    "logger": {"log_dir": "x"},
}


def config_changes(old, new, **facts):
    return ComparedConfig(values=new, algorithm="grpo", **facts).changes({"config": old})


def changed(section, key, value):
    new = {name: dict(values) for name, values in OLD.items()}
    new[section][key] = value
    return config_changes(OLD, new)


def test_length_and_location_may_change_on_resume():
    assert changed("grpo", "max_num_steps", 20) == {}
    assert changed("logger", "log_dir", "y") == {}
    assert changed("policy", "logprob_batch_size", 8) == {}


def test_every_setting_of_validation_may_change_on_resume():
    old = {"grpo": {"max_val_samples": None, "val_period": 5}, "policy": {"generation": {"val_temperature": 0.0}}}
    new = {"grpo": {"max_val_samples": 8, "val_period": 2}, "policy": {"generation": {"val_temperature": 1.0}}}
    assert config_changes(old, new) == {}


def test_another_model_or_seed_is_another_run():
    assert changed("policy", "model_name", "b") == {"policy.model_name": ("a", "b")}
    assert changed("grpo", "seed", 2) == {"grpo.seed": (1, 2)}


def test_a_new_key_counts_as_a_config_change():
    assert changed("grpo", "num_prompts_per_step", 4) == {"grpo.num_prompts_per_step": (None, 4)}


NEW_KEYS = {
    ("policy", "shared_prefix"): "auto",
    ("policy", "hf_cfg", "cache", "size"): 4,
    ("policy", "scheduler", "name"): "linear",
    ("env", "math", "num_workers"): 1,
    ("policy", "model_name"): "b",
    ("policy", "generation", "sleep_level"): None,
}
"""Keys of the current config with their defaults."""


def nested(path, value):
    return {path[0]: nested(path[1:], value)} if path else value


@pytest.mark.parametrize(
    ("before", "path", "is_change"),
    [
        ({"policy": {}}, ("policy", "shared_prefix"), False),
        ({"policy": {"hf_cfg": {}}}, ("policy", "hf_cfg", "cache", "size"), False),
        ({"policy": {"scheduler": None}}, ("policy", "scheduler", "name"), True),  # it was off
        ({"env": {"code": {"num_workers": 1}}}, ("env", "math", "num_workers"), True),  # a new environment
        ({"policy": {"model_name": "a"}}, ("policy", "model_name"), True),
    ],
    ids=str,
)
def test_a_key_that_the_checkpoint_does_not_have_counts_as_its_default(before, path, is_change):
    given = nested(path, NEW_KEYS[path])
    after = {**before, path[0]: {**before[path[0]], **given[path[0]]}}
    changes = config_changes(before, after, default=NEW_KEYS.get)
    assert (".".join(path) in changes) == is_change
    other = {**before, path[0]: {**before[path[0]], **nested(path, "other")[path[0]]}}
    assert ".".join(path) in config_changes(before, other, default=NEW_KEYS.get)


def test_null_instead_of_a_fixed_default_is_not_a_change_if_the_devices_decide():
    path = ("policy", "generation", "sleep_level")
    old, new = nested(path, 0), nested(path, None)
    assert config_changes(old, new) == {"policy.generation.sleep_level": (0, None)}
    assert config_changes(old, new, by_device={path}) == {}
    assert config_changes(old, nested(path, 1), by_device={path})


def test_other_rows_are_refused_whatever_else_of_the_data_changed(tmp_path):
    before = {"data.train.path": {"a digest": "1", "old": "1", ROWS: "1"}}
    after = {"data.train.path": {"a digest": "2", "new": "1", ROWS: "2"}}
    now = ComparedConfig(values=OLD, algorithm="grpo", inputs=after)
    with pytest.raises(CheckpointError, match=re.escape("A resume cannot change data.train.path: the order")) as refused:
        now.refuse_changes(tmp_path, {"config": OLD, "inputs": before}, allow=True)
    assert "data.train.path: a digest changed, new was added, old was removed, and 1 more\n" in str(refused.value)
