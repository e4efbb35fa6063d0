"""The conformance tests of rlcore, with a small LitGPT model that is computed one row at a time, without its cache."""

import torch
from litgpt.config import Config
from litgpt.model import GPT
from rl_backends_litgpt.model import save

from rl_core.testing import GenerationConformance, PackagingConformance, PolicyConformance, ReferenceModel
from rl_core.testing.reference import EOS, MAX_LENGTH, VOCABULARY

CONFIG = {
    **{"name": "small", "vocab_size": VOCABULARY, "block_size": MAX_LENGTH, "n_layer": 2, "n_embd": 32, "n_head": 4},
    **{"n_query_groups": 2, "intermediate_size": 64, "mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm"},
    **{"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "padding_multiple": 64},
}


class Small(ReferenceModel):
    """LitGPT's own forward pass; its vocabulary is padded from 260 to 320."""

    def make_weights(self):
        torch.manual_seed(0)
        weights = {name: 0.3 * torch.randn_like(weight) for name, weight in GPT(Config(**CONFIG)).state_dict().items()}
        weights["lm_head.weight"][EOS] *= 2
        return weights

    def save_weights(self, folder, weights):
        save(weights, Config(**CONFIG), folder)

    def logits(self, weights, tokens):
        model = GPT(Config(**CONFIG))
        return torch.func.functional_call(model, dict(weights), (tokens[None],))[0, :, :VOCABULARY]


class TestPolicy(PolicyConformance):
    component = "litgpt"
    model = Small()


class TestEngine(GenerationConformance):
    component = "litgpt"
    model = Small()


class TestPackage(PackagingConformance):
    component = "litgpt"
