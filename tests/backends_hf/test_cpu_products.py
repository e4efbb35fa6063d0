"""Products of bfloat16 matrices that the policy computes in float32 on CPUs without instructions for them."""

import pytest
import torch

from rl_backends_hf.cpu_products import float32_products
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import UserError

LR = 0.5


@pytest.fixture
def start(parts, model_folder):
    """A function that starts a policy on a tiny model."""

    def start(**fields):
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("llama"), **fields))
        worker.setup()
        return worker

    return start


@pytest.fixture
def variants(start):
    """The same bfloat16 policy with each choice of `cpu_products`."""
    optimizer = {"name": "torch.optim.SGD", "kwargs": {"lr": LR}}
    return {
        chosen: start(precision="bfloat16", optimizer=optimizer, max_grad_norm=None, hf={"cpu_products": chosen})
        for chosen in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("call", ["mm", "bmm", "addmm", "addmm_", "mm_out"])
def test_a_product_is_that_of_float32_rounded_once(call):
    draw = torch.Generator().manual_seed(0)
    batch = (3,) if call == "bmm" else ()
    left, right, other = (torch.randn(*batch, 8, 8, generator=draw).bfloat16() for _ in range(3))
    exact = left.float() @ right.float() + (other.float() if "addmm" in call else 0)
    with float32_products(True):
        if call == "addmm_":
            found = other.addmm_(left, right)
            assert found is other
        elif call == "mm_out":
            found = torch.mm(left, right, out=other)
            assert found is other
        else:
            found = getattr(torch, call)(*([other] if call == "addmm" else []), left, right)
    # One rounding; the order of float32 sums can move a value across a rounding boundary, which is one step of 2^-8.
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=1e-6)
    assert found.dtype == torch.bfloat16


def test_logprobs_equal_float32_within_the_rounding_of_bfloat16(parts, variants, start):
    rows = parts.make_rows()
    exact = start().get_logprobs(rows)["logprobs"]
    found = {chosen: worker.get_logprobs(rows)["logprobs"] for chosen, worker in variants.items()}
    # Weights and activations have 8 bits; log-probabilities of about 5 nats from 160 tokens differ by hundredths.
    torch.testing.assert_close(found["float32"], exact, rtol=0, atol=0.1)
    # Both products are summed in float32 and rounded once, so they differ by single roundings only.
    torch.testing.assert_close(found["float32"], found["bfloat16"], rtol=0, atol=0.05)


def test_training_keeps_weights_and_transfers_in_bfloat16(parts, variants):
    rows = parts.make_rows()
    first = {}
    for chosen, worker in variants.items():
        before = {name: each.clone() for name, each in worker.iter_weights()}
        manifest = worker.weight_manifest()
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        after = dict(worker.iter_weights())
        assert worker.weight_manifest() == manifest
        assert {each.dtype for each in worker._scoring.parameters()} == {torch.bfloat16}
        assert all(each.dtype == torch.bfloat16 for each in after.values())
        first[chosen] = before, worker._state.masters.parameters
    for name, before in first["float32"][0].items():
        assert torch.equal(before, first["bfloat16"][0][name])  # what a refit sends before training
    for name, master in first["float32"][1].items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, first["bfloat16"][1][name], rtol=0.02, atol=2e-3)


def test_the_choice_is_logged_once_and_depends_on_the_cpu(start, own_messages, monkeypatch, caplog):
    caplog.set_level("INFO")
    for has_instructions, products in ((False, True), (True, False)):
        monkeypatch.setattr("rl_backends_hf.cpu_products.has_bfloat16_products", lambda value=has_instructions: value)
        assert start(precision="bfloat16")._float32_products is products
    assert sum("no bfloat16 instructions" in message for message in own_messages()) == 1


def test_products_that_have_no_effect_are_refused(start):
    with pytest.raises(UserError, match=r"cpu_products.*float32.*no effect"):
        start(precision="float32", hf={"cpu_products": "float32"})
