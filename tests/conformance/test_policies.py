"""The Transformers policy keeps the promises of policies."""

from kit_pictures import QwenVL

from rl_core.testing import PolicyConformance


class TestHF(PolicyConformance):
    component = "hf"
    picture_model = QwenVL()
