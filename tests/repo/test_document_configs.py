"""Every config in README and docs passes `rlcore validate`: alone if it is complete, otherwise as a change of a small run."""

import json
import re

import pytest
import yaml
from command_line import rlcore
from documents import PAGES, ROOT, blocks, write_modules

CHECKED_ELSEWHERE = {
    "docs/data.md": "tests/core/data/test_data_docs.py reads the data as well",
    "docs/nemo_rl_names.md": "tests/backends_openai/test_promised_configs.py trains with them",
    "docs/dependencies_that_conflict.md-0": "needs another interpreter: tests/plugins/test_dependencies_that_conflict.py",
    "docs/evaluation.md-1": "needs rows of benchmarks: tests/envs/test_public_benchmarks.py",
    "docs/evaluation.md-2": "a task of lm-evaluation-harness: tests/serve/test_lm_eval.py runs one",
    "docs/lora.md-4": "needs an adapter: tests/backends_hf/test_lora_life.py",
    "docs/write_a_logger.md": "needs the plugin of the page: tests/plugins/test_scaffold.py trains with it",
    "rl_backends_openai/README.md-0": "only for `rlcore eval`: tests/backends_openai/test_evaluation.py",
    "docs/write_an_algorithm.md": "needs the plugin of the page: tests/plugins/test_scaffold.py trains with it",
}
TRAINED = {
    "policy": {"backend": "hf", "model_name": "some/model"},
    "data": {"train": {"dataset_name": "jsonl", "path": "rows.jsonl"}},
}
SAMPLED = {"policy": {"generation": {"backend": "hf", "max_new_tokens": 16}}}
WITHOUT_SAMPLES = {"sft", "dpo", "kto", "rm"}
ALGORITHMS = {*WITHOUT_SAMPLES, "grpo", "ppo", "distillation", "algorithm"}
CONTEXT = {"docs/evaluation.md": {"env": {"math": {}, "arithmetic": {}}}}
INSTALLED = {"acme_game": "guess"}
"""Plugins that a page makes up, and the component that takes their place."""
FIELDS = "question prompt expected_answer answer chosen completion instruction_id_list kwargs initial_count expected_count"
ROW = {**dict.fromkeys(FIELDS.split(), "1+1="), "rejected": "3", "label": True, "level": 1}
"""The row of every data file."""


def shown():
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for number, block in enumerate(blocks(name, "yaml")):
            yield name, f"{name}-{number}", block


SHOWN = list(shown())
CHECKED = [pytest.param(page, block, id=name) for page, name, block in SHOWN if not {page, name} & set(CHECKED_ELSEWHERE)]


def merged(base, changes):
    both = {key: merged(base[key], value) for key, value in changes.items() if isinstance(value, dict) and key in base}
    return {**base, **changes, **both}


def completed(page, config):
    """A config with the sections of a small run that it does not have."""
    if page == "docs/sandbox.md":
        config = {"env": {"code": config}}
    base = TRAINED
    if not WITHOUT_SAMPLES & set(config):
        base = merged(base, SAMPLED)
        if not ALGORITHMS & set(config):
            base = base | {"grpo": {}}
        if "env" not in config and "distillation" not in config:
            base = base | {"env": {"guess": {}}}
    if {"train", "mix", "train_data_path"} & set(config.get("data", {})):
        base = base | {"data": {}}
    return merged(merged(base, CONTEXT.get(page, {})), config)


def files_of(config):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from files_of(value)
        elif key in ("path", "train_data_path", "val_data_path"):
            yield value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    write_modules(folder)
    return folder


@pytest.mark.parametrize(("page", "block"), CHECKED)
def test_a_config_of_the_documents_is_valid(page, block, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # a cluster with as many CPUs as the page assumes
    for variable in re.findall(r"oc\.env:(\w+)", block):
        monkeypatch.setenv(variable, "secret")
    for made_up, component in INSTALLED.items():
        block = block.replace(made_up, component)
    config = completed(page, yaml.safe_load(block))
    for path in files_of(config):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(ROW) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    done = rlcore("validate", folder / "config.yaml")
    assert done.returncode == 0, done.stderr


def test_configs_that_are_checked_elsewhere_exist():
    assert set(CHECKED_ELSEWHERE) <= {name for page, number, _ in SHOWN for name in (page, number)}
    assert len(CHECKED) > 45
