"""Our algorithms keep the promises of algorithms."""

from typing import ClassVar

import pytest

from rl_train.testing import AlgorithmConformance

FULL = pytest.mark.full("trains four runs; grpo and sft keep these promises in CI, and tests/e2e trains the others")
SMALL = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}


class TestGRPO(AlgorithmConformance):
    component = "grpo"
    config: ClassVar = SMALL


class TestSFT(AlgorithmConformance):
    component = "sft"


@FULL
class TestPPO(AlgorithmConformance):
    component = "ppo"
    config: ClassVar = SMALL


@FULL
class TestDistillation(AlgorithmConformance):
    component = "distillation"
    config: ClassVar = {"num_prompts_per_step": 4}


@FULL
class TestDPO(AlgorithmConformance):
    component = "dpo"


@FULL
class TestRewardModel(AlgorithmConformance):
    component = "rm"


@FULL
class TestKTO(AlgorithmConformance):
    component = "kto"
