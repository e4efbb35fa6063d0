"""Sections given from Python have the error messages of a config file, with suggestions."""

import pytest

from rl_backends_hf.config import HFPolicyConfig
from rl_core.config.validator import read_section, section_from_keywords, section_of_values
from rl_core.errors import ConfigError
from rl_envs.config import MathEnvironmentConfig
from rl_train.config.loader import load_config


def test_misspelled_backend_arguments_get_a_suggestion():
    with pytest.raises(ConfigError) as caught:
        section_from_keywords(
            "HuggingFacePolicy",
            HFPolicyConfig,
            own="hf_cfg",
            fields={"precision": "bf16", "lora": {"rnk": 2}},
            model_name="some/model",
        )
    assert str(caught.value).splitlines() == [
        "HuggingFacePolicy: precision: must be 'float32' or 'bfloat16' or null; found 'bf16'. Did you mean 'bfloat16'?",
        "HuggingFacePolicy: hf_cfg.lora.rnk: hf_cfg.lora has no key 'rnk'. Did you mean 'rank'?",
    ]


SECTIONS = {"policy": HFPolicyConfig(model_name="m"), "data": {}, "checkpointing": {"enabled": False}}


def test_python_values_are_loaded_like_a_file_and_a_model_is_kept_as_it_is():
    run = load_config({"sft": {"max_num_steps": 3}, **SECTIONS}, stages=()).run
    assert run.policy is SECTIONS["policy"]
    assert (run.algorithm_name, run.algorithm.max_num_steps, run.loss_fn.name) == ("sft", 3, "nll")
    with pytest.raises(ConfigError) as caught:
        load_config({"sft": {"max_steps": 3, "max_num_steps": 0}, **SECTIONS, "rollout": {"retries": -1}}, stages=())
    assert str(caught.value).splitlines() == [
        "sft.max_num_steps: must be a whole number, 1 or more; found 0.",
        "sft.max_steps: sft has no key 'max_steps'. Did you mean 'max_num_steps'?",
        "rollout.retries: must be a whole number, 0 or more; found -1.",
    ]


def test_a_cluster_counts_as_set_only_if_the_values_have_it():
    assert "cluster" not in load_config({"sft": {}, **SECTIONS}, stages=()).run.model_fields_set
    assert "cluster" in load_config({"sft": {}, **SECTIONS, "cluster": {"num_nodes": 2}}, stages=()).run.model_fields_set


def test_null_selects_what_a_section_implies():
    run = load_config({"sft": {}, **SECTIONS, "loss_fn": {"name": None}}, stages=()).run
    assert run.loss_fn.name == "nll"


def test_an_interpolation_in_python_values_is_plain_text():
    run = load_config({"sft": {}, **SECTIONS, "logger": {"run_name": "${oc.env:HOME}"}}, stages=()).run
    assert run.logger.run_name == "${oc.env:HOME}"


def test_misspelled_trainer_and_environment_keys_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"policy\.precison: policy has no key 'precison'\. Did you mean 'precision'\?"):
        section_of_values(HFPolicyConfig, {"model_name": "m", "precison": "float32"}, name="policy")
    with pytest.raises(ConfigError, match=r"timeout: MathEnvironmentConfig has no key 'timeout'\. Did you mean 'timeout_s'\?"):
        read_section(MathEnvironmentConfig, {"timeout": 1.0})
