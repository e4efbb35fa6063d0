"""The Transformers policy keeps the promises of policies; the reference model of the kit."""

import pytest
import torch
from kit_pictures import QwenVL

from rl_backends_base import DistributedPolicy
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.backend import PolicyFacts
from rl_core.config.schema import PolicyConfig
from rl_core.testing import PolicyConformance, ReferenceModel
from rl_core.testing.comparisons import check_facts
from rl_core.testing.policies import KitLoss, make_rows
from rl_core.testing.promises import Found
from rl_core.testing.reference import VOCABULARY, ReferenceTrainer


class TestHF(PolicyConformance):
    component = "hf"
    picture_model = QwenVL()


class Scaled(ReferenceModel):
    """Two matrices, and the frequencies of each layer, which are buffers."""

    buffers = ("0.scale", "1.scale")

    def make_weights(self):
        torch.manual_seed(0)
        sizes = {"embedding": (VOCABULARY, 8), "head": (VOCABULARY, 8), "0.scale": (8,), "1.scale": (8,)}
        return {name: torch.randn(size) for name, size in sizes.items()}

    def save_weights(self, folder, weights):
        raise NotImplementedError

    def logits(self, weights, tokens):
        return weights["embedding"][tokens] * weights["0.scale"] * weights["1.scale"] @ weights["head"].T


def test_steps_of_the_reference_leave_buffers_alone_and_out_of_the_gradient_norm():
    model = Scaled()
    section = PolicyConfig(
        backend="any", model_name="any", max_grad_norm=0.02, optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}
    )
    weights, rows = model.make_weights(), make_rows(seed=1)
    trainer = ReferenceTrainer(model, weights, section)
    reported = trainer.train(rows, KitLoss())
    assert [name for name, weight in trainer.weights.items() if weight.equal(weights[name])] == ["0.scale", "1.scale"]
    # `train` has clipped the gradients of what it trains to the norm 0.02.
    of_trained = [trainer.weights[name].grad.norm() for name in ("embedding", "head")]
    assert torch.stack(of_trained).norm().item() == pytest.approx(0.02, rel=1e-4)
    assert reported["grad_norm"] > 0.02
    assert trainer.weights["0.scale"].grad is None


class Loaded(DistributedPolicy):
    """A policy whose workers have reported these facts."""

    worker_class = HFPolicyWorker
    facts = {"device": "cpu", "vocab_size": 8, "num_parameters": 10}  # noqa: RUF012

    def __init__(self):
        pass


def test_a_wrong_number_of_parameters_asks_for_buffers():
    with pytest.raises(Found, match=r"the model of the test 12\. Are all saved buffers in `buffers`"):
        check_facts(Loaded(), PolicyFacts, num_parameters=12)
