"""Products of matrices that the policy replaces: of bfloat16 by float32, and large ones of float32 by oneDNN's."""

import os

import pytest
import torch

from rl_backends_hf import cpu_products
from rl_backends_hf.cpu_products import CpuProducts
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import UserError

LR = 0.5
ONEDNN = "mkldnn::_linear_pointwise"


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


def multiplied(call, left, right, other, products):
    """The result of one of torch's products, which is `other` if the call changes it."""
    with products():
        if call == "addmm_":
            found = other.addmm_(left, right)
        elif call == "mm_out":
            found = torch.mm(left, right, out=other)
        else:
            function = getattr(torch, call.removesuffix("_bias"))
            return function(*([other] if "addmm" in call else []), left, right)
    assert found is other
    return found


@pytest.mark.parametrize("call", ["mm", "bmm", "addmm", "addmm_", "mm_out"])
def test_a_product_is_that_of_float32_rounded_once(call):
    draw = torch.Generator().manual_seed(0)
    batch = (3,) if call == "bmm" else ()
    left, right, other = (torch.randn(*batch, 8, 8, generator=draw).bfloat16() for _ in range(3))
    exact = left.float() @ right.float() + (other.float() if "addmm" in call else 0)
    found = multiplied(call, left, right, other, CpuProducts(in_float32=True))
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
        assert {each.dtype for each in worker.model.parameters()} == {torch.bfloat16}
        assert all(each.dtype == torch.bfloat16 for each in after.values())
        first[chosen] = before, worker.state.masters.parameters
    for name, before in first["float32"][0].items():
        assert torch.equal(before, first["bfloat16"][0][name])  # what a refit sends before training
    for name, master in first["float32"][1].items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, first["bfloat16"][1][name], rtol=0.02, atol=2e-3)


def test_the_choice_is_logged_once_and_depends_on_the_cpu(start, own_messages, monkeypatch, caplog):
    caplog.set_level("INFO")
    for has_instructions, products in ((False, True), (True, False)):
        monkeypatch.setattr("rl_backends_hf.cpu_products.has_bfloat16_products", lambda value=has_instructions: value)
        assert start(precision="bfloat16")._products.in_float32 is products
    assert sum("no bfloat16 instructions" in message for message in own_messages()) == 1


def test_products_that_have_no_effect_are_refused(start):
    with pytest.raises(UserError, match=r"cpu_products.*float32.*no effect"):
        start(precision="float32", hf={"cpu_products": "float32"})


def strided(tensor, layout):
    """The same numbers in memory as a transposed matrix, or as a part of wider rows."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]] if layout == "part" else tensor


@pytest.mark.parametrize("layouts", [("rows", "rows"), ("transposed", "rows"), ("rows", "transposed"), ("part", "part")])
@pytest.mark.parametrize("call", ["mm", "addmm", "addmm_bias", "addmm_", "mm_out"])
def test_a_product_of_onednn_is_as_exact_as_torchs(call, layouts, monkeypatch):
    monkeypatch.setattr(cpu_products, "_MIN_PRODUCTS", 1)
    monkeypatch.setattr(cpu_products, "_BLOCK", 1000)  # several blocks, of which the last is smaller
    draw = torch.Generator().manual_seed(0)
    shapes = (37, 50), (50, 70), ((70,) if call == "addmm_bias" else (37, 70))
    left, right, other = (torch.randn(*shape, generator=draw) for shape in shapes)
    exact = left.double() @ right.double() + (other.double() if "addmm" in call else 0)
    left, right = strided(left, layouts[0]), strided(right, layouts[1])
    with torch.profiler.profile() as profile:
        found = multiplied(call, left, right, other, CpuProducts(by_onednn=True))
    assert ONEDNN in {event.key for event in profile.key_averages()}
    # 50 products of normal numbers: rounding errors of float32 (2^-24) grow with at most their number.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=50 * 2**-24 * 4)


@pytest.mark.parametrize("call", ["beta", "small", "float64"])
def test_other_products_are_torchs(call, monkeypatch):
    left, right, other = (torch.randn(64, 64) for _ in range(3))
    if call != "small":
        monkeypatch.setattr(cpu_products, "_MIN_PRODUCTS", 1)
    if call == "float64":
        left, right, other = left.double(), right.double(), other.double()
    scale = {"beta": 0.5} if call == "beta" else {}
    expected = torch.addmm(other, left, right, **scale)
    with CpuProducts(by_onednn=True)():
        assert torch.equal(torch.addmm(other, left, right, **scale), expected)


def test_gradients_are_those_of_torchs_products(monkeypatch):
    monkeypatch.setattr(cpu_products, "_MIN_PRODUCTS", 1)
    layers = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.SiLU(), torch.nn.Linear(48, 8, bias=False))
    inputs, gradients = torch.randn(2, 17, 24), []
    for products in (CpuProducts(), CpuProducts(by_onednn=True)):
        layers.zero_grad()
        with products():
            layers(inputs).square().mean().backward()
        gradients.append([each.grad.clone() for each in layers.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("cpu", "capability", "has_mkl", "weights", "expected"),
    [
        ("AuthenticAMD", "AVX512", True, 2**17, True),
        ("GenuineIntel", "AVX512", True, 2**17, False),
        ("AuthenticAMD", "AVX2", True, 2**17, False),
        ("AuthenticAMD", "AVX512", False, 2**17, False),
        ("AuthenticAMD", "AVX512", True, 2**17 - 1, False),
    ],
)
def test_onednn_is_used_where_mkl_is_slow_and_products_are_large(
    cpu, capability, has_mkl, weights, expected, monkeypatch, tmp_path
):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {cpu}\n")
    monkeypatch.setattr(cpu_products, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})  # the user's
    model = torch.nn.Linear(weights, 1, bias=False)
    assert CpuProducts.of("auto", torch.float32, torch.device("cpu"), model=model) == CpuProducts(by_onednn=expected)
    assert not CpuProducts.of("auto", torch.float32, torch.device("cuda"), model=model).by_onednn
    assert not CpuProducts.of("auto", torch.float32, torch.device("cpu")).by_onednn  # its layers are compiled
    limits = {"LRU_CACHE_CAPACITY": "7"} | ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"} if expected else {})
    assert os.environ == limits


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradients_of_embeddings_and_layer_norms_in_bfloat16_are_summed_in_float32(kind, parts, model_folder):
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), precision="bfloat16"))
    worker.setup()
    model, tokens = worker.model.model, 4096
    embedding = model.get_input_embeddings()
    (gradient,) = torch.autograd.grad(embedding(torch.full((tokens,), 7)).sum(), embedding.weight)
    assert (gradient[7] == tokens).all()  # a bfloat16 sum of ones ends at 256
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
        rows = torch.randn(tokens, model.config.hidden_size).bfloat16()
        (gradient,) = torch.autograd.grad(norm(rows).sum(), norm.bias)
        assert (gradient == tokens).all()
