"""The Transformers policy keeps the promises of policies."""

from rl_core.testing import PolicyConformance


class TestHF(PolicyConformance):
    component = "hf"
