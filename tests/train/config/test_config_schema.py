"""The JSON schema accepts what the loader accepts, and the reference pages document every key."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.aliases import MEANINGS
from rl_train.config.json_schema import json_schema
from rl_train.config.reference import reference
from rl_train.config.schema_index import schema_index

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(schema_index(Registry(discover())))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def is_accepted(validator, text):
    return validator.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_it_accepts_the_examples(validator, example):
    errors = [error.message for error in validator.iter_errors(yaml.safe_load(example.read_text()))]
    assert errors == []


def test_it_accepts_the_whole_resolved_config(validator, files, good):
    assert is_accepted(validator, files.load(good).to_yaml())


ACCEPTED = {
    "an interpolated number": ("max_new_tokens: 64", "max_new_tokens: ${policy.max_total_sequence_length}"),
    "an interpolated section": ("arithmetic: {}", "arithmetic: ${env.other}"),
    "a missing key that a parent may have": ("  model_name: some/model\n", ""),
    "a parent": ("grpo:", "defaults: [a.yaml, b.yaml]\ngrpo:"),
    "a section that replaces": ("  backend: hf\n  model", "  _override_: true\n  backend: hf\n  model"),
    "an empty section": ("arithmetic: {}", "arithmetic:"),
    "a backend by its path": ("  backend: hf\n  model", "  backend: my.own.Policy\n  my_cfg: {a: 1}\n  model"),
    "an environment by its path": ("arithmetic: {}", "weather: {env_cls: my.own.Weather, station: 3}"),
    "an environment by its name": ("arithmetic: {}", "sums: {name: math, timeout_s: 2}"),
}
REFUSED = {
    "an unknown section": ("grpo:", "grop:"),
    "an unknown key of the algorithm": ("num_prompts_per_step", "num_promts_per_step"),
    "an unknown key of the policy": ("model_name", "modle_name"),
    "an unknown key of the backend's own section": ("  model_name:", "  hf_cfg: {x: 1}\n  model_name:"),
    "an unknown key of the generation backend": ("max_new_tokens", "max_tokens"),
    "an unknown key of the dataset": ("dataset_name: arithmetic", "dataset_name: arithmetic, x: 1"),
    "an unknown key of the environment": ("arithmetic: {}", "arithmetic: {x: 1}"),
    "an unknown key of a named environment": ("arithmetic: {}", "sums: {name: math, x: 1}"),
    "an unknown key next to an agent": ("arithmetic: {}", "sums: {agent: my.own.play, x: 1}"),
    "a wrong type": ("step: 8", "step: eight"),
    "a value out of bounds": ("step: 8", "step: 0"),
    "a word that is no choice": ("  model_name:", "  precision: bf16\n  model_name:"),
    "a backend that is not installed": ("  backend: hf\n  model", "  backend: zeppelin\n  model"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts_what_only_the_loader_can_check(validator, good, case):
    assert is_accepted(validator, good.replace(*ACCEPTED[case], 1))


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_rejects_mistakes_that_an_editor_should_show(validator, good, case):
    assert not is_accepted(validator, good.replace(*REFUSED[case], 1))


def test_keys_carry_their_docstrings(validator):
    definition = validator.schema["$defs"]["GRPOConfig"]["properties"]["num_prompts_per_step"]
    assert definition["description"] == "P, number of prompts per step."


def test_the_reference_page_is_current():
    plugins = ["core", "train", "hf", "megatron", "vllm", "openai", "envs"]
    sections = schema_index(Registry(discover()), plugins=plugins)
    page = (ROOT / "docs" / "config_reference.md").read_text()
    assert page == reference(sections, plugins=",".join(plugins)), "the page names the command that makes it"


def test_every_key_of_every_section_has_a_docstring():
    from rl_core.config.source_tree import dotted

    plugins = ["core", "train", "hf", "megatron", "vllm", "openai", "envs"]
    sections = schema_index(Registry(discover()), plugins=plugins)
    silent = {dotted(f.path) for section in sections.sections for f in section.fields() if not f.info.description}
    assert not silent


def test_names_of_other_libraries_lead_to_our_keys():
    index = schema_index(Registry(discover()))
    fields = [field for section in index.sections for field in section.fields()]
    names = {str(field.path[-1]) for field in fields}
    arguments = {name for field in fields if isinstance(field.default, dict) and field.model is None for name in field.default}
    assert set(MEANINGS.values()) <= names | arguments
