"""vLLM keeps the promises of generation backends."""

from typing import ClassVar

import pytest
from kit_pictures import QwenVL

from rl_core.testing import GenerationConformance


@pytest.mark.vllm
class TestVllm(GenerationConformance):
    component = "vllm"
    picture_model = QwenVL()
    config: ClassVar = {
        "vllm_cfg": {
            "precision": "float32",
            "max_model_len": 128,
            "max_num_seqs": 32,
            "enforce_eager": True,
        }
    }
