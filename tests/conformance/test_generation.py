"""The Transformers engine keeps the promises of generation backends."""

from rl_core.testing import GenerationConformance


class TestHF(GenerationConformance):
    component = "hf"
