"""Megatron keeps the promises of policies."""

import pytest

from rl_core.testing import PolicyConformance


@pytest.mark.megatron
class TestMegatron(PolicyConformance):
    component = "megatron"
