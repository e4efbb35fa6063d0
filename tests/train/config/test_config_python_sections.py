"""Sections given from Python have the error messages of a config file, with suggestions."""

import pytest

from rl_backends_hf.config import HFPolicyConfig
from rl_core.config.keywords import section_from_keywords
from rl_core.errors import ConfigError
from rl_envs.config import MathEnvironmentConfig, read_section
from rl_train.trainers.trainer_data import section_from


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
        "HuggingFacePolicy: precision: must be 'float32' or 'bfloat16'; found 'bf16'. Did you mean 'bfloat16'?",
        "HuggingFacePolicy: hf_cfg.lora.rnk: hf_cfg.lora has no key 'rnk'. Did you mean 'rank'?",
    ]


def test_misspelled_trainer_and_environment_keys_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"policy\.precison: policy has no key 'precison'\. Did you mean 'precision'\?"):
        section_from(HFPolicyConfig, {"model_name": "m", "precison": "float32"}, "policy")
    with pytest.raises(ConfigError, match=r"timeout: MathEnvironmentConfig has no key 'timeout'\. Did you mean 'timeout_s'\?"):
        read_section(MathEnvironmentConfig, {"timeout": 1.0})
