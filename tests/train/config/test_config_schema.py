"""The JSON schema accepts what the loader accepts, and the reference pages document every key."""

import dataclasses
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from rl_core.config.diagnostics import KEY_CUTOFF, InvalidConfigError, dotted, nearest
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.foreign_names import INSTEAD, MEANINGS
from rl_train.config.loader import load_config
from rl_train.config.reference import json_schema, reference, schema_index

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
    plugins = ["core", "train", "hf", "megatron", "vllm", "openai", "envs"]
    sections = schema_index(Registry(discover()), plugins=plugins)
    silent = {dotted(f.path) for section in sections.sections for f in section.fields() if not f.info.description}
    assert not silent


@pytest.fixture(scope="module")
def keys():
    """All full keys, including the default arguments of free mappings."""
    fields = [field for section in schema_index(Registry(discover())).sections for field in section.fields()]
    arguments = [
        (field, name) for field in fields if isinstance(field.default, dict) and field.model is None for name in field.default
    ]
    return {dotted(field.path) for field in fields} | {f"{dotted(field.path)}.{name}" for field, name in arguments}


def test_names_of_other_libraries_lead_to_our_keys(keys):
    names = {key.rpartition(".")[2] for key in keys}
    assert set(MEANINGS.values()) <= names
    assert not set(INSTEAD) & (names | {*MEANINGS})
    given = {key for text in INSTEAD.values() for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", text)}
    assert {key for key in given if key not in keys and not key.startswith("policy.optimizer.kwargs")} == set()


def test_no_setting_of_trl_or_transformers_is_mistaken_for_a_misspelled_key(keys):
    trl = pytest.importorskip("trl")
    kinds = (trl.GRPOConfig, trl.DPOConfig, trl.SFTConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {*MEANINGS, *INSTEAD}
    ends = {key.rpartition(".")[2] for key in keys}
    assert {name: meant for name in names - ends if (meant := nearest(name, ends, cutoff=KEY_CUTOFF))} == {}
    assert {"disable_dropout", "adam_beta1", "dataset_num_proc"} <= {*INSTEAD}
    for place in ((), ("grpo",), ("policy",), ("policy", "generation"), ("data", "train"), ("loss_fn",), ("checkpointing",)):
        config = {"grpo": {}, "policy": {"backend": "hf", "generation": {"backend": "hf"}}, "data": {"train": {}}}
        section = config
        for part in place:
            section = section.setdefault(part, {})
        section.update(dict.fromkeys(names, 1))
        with pytest.raises(InvalidConfigError) as error:
            load_config(config)
        hints = {
            str(problem.path[-1]): problem.message for problem in error.value.problems if "Did you mean" in problem.message
        }
        assert {name: hint for name, hint in hints.items() if name in names - ends} == {}
