"""Gradients of bfloat16 embeddings and layer norms on a CPU, which are sums over all tokens of a microbatch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from rl_backends_hf.cpu_products import sum_gradients_in_float32

VOCAB, WIDTH = 12, 8


def embedding(kind: str = "plain", dtype: torch.dtype = torch.bfloat16) -> nn.Embedding:
    """An embedding with float32 sums; the padding token, if there is one, has no gradient."""
    make = {
        "plain": lambda: nn.Embedding(VOCAB, WIDTH),
        "padded": lambda: nn.Embedding(VOCAB, WIDTH, padding_idx=-2),
        "scaled": lambda: Gemma3TextScaledWordEmbedding(VOCAB, WIDTH, padding_idx=0, embed_scale=4.0),
    }
    module = make[kind]().to(dtype)
    sum_gradients_in_float32([module])
    return module


def summed(ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients of each token, float64."""
    return torch.zeros(VOCAB, WIDTH, dtype=torch.float64).index_add_(0, ids.flatten(), gradient.flatten(0, -2).double())


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    # Half a unit in the last of 8 bits, and what float32 sums of as many terms may lose.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + terms * 2**-20).all()


@given(
    counts=st.lists(st.integers(0, 700), min_size=VOCAB, max_size=VOCAB),
    seed=st.integers(0, 2**16),
    rows=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_a_token_is_the_sum_over_its_occurrences_rounded_once(counts, seed, rows):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(VOCAB), torch.tensor(counts))
    ids = torch.cat([ids, ids.new_zeros(-len(ids) % rows)])
    ids = ids[torch.randperm(len(ids), generator=draw)].reshape(rows, -1)
    gradient = (1 + torch.randn(*ids.shape, WIDTH, generator=draw)).bfloat16()
    module = embedding()
    module(ids).backward(gradient)
    assert module.weight.grad.dtype == torch.bfloat16
    assert_rounded_once(module.weight.grad, summed(ids, gradient), summed(ids, gradient.abs()))


@pytest.mark.parametrize(("kind", "padding", "scale"), [("plain", None, 1.0), ("padded", VOCAB - 2, 1.0), ("scaled", 0, 4.0)])
def test_embeddings_of_all_kinds_return_the_same_rows_and_leave_padding_out(kind, padding, scale):
    ids = torch.arange(VOCAB).repeat(50).reshape(4, -1)
    gradient = torch.ones(*ids.shape, WIDTH, dtype=torch.bfloat16)
    module = embedding(kind)
    found = module(ids)
    assert torch.equal(found, module.weight[ids] * scale)
    found.backward(gradient)
    expected = torch.full((VOCAB, WIDTH), 50 * scale)
    if padding is not None:
        expected[padding] = 0
    assert torch.equal(module.weight.grad.float(), expected)


def test_other_data_types_and_frozen_weights_are_torchs():
    ids = torch.randint(VOCAB, (3, 40))
    gradient = torch.randn(3, 40, WIDTH)
    changed, plain = embedding(dtype=torch.float32), nn.Embedding(VOCAB, WIDTH)
    plain.load_state_dict(changed.state_dict())
    for module in (changed, plain):
        module(ids).backward(gradient)
    assert torch.equal(changed.weight.grad, plain.weight.grad)
    assert not embedding().requires_grad_(False)(ids).requires_grad


def test_a_copy_of_a_module_reads_its_own_weight():
    module = embedding()
    sum_gradients_in_float32([module])
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.add_(1)
    ids = torch.arange(VOCAB)
    assert torch.equal(other(ids), other.weight)
    assert torch.equal(module(ids), module.weight)


def test_torch_itself_still_loses_gradients_of_frequent_tokens():
    """If this fails, torch sums in float32, and the replacement can be removed for that release."""
    module = nn.Embedding(VOCAB, WIDTH).bfloat16()
    module(torch.zeros(4096, dtype=torch.int64)).backward(torch.ones(4096, WIDTH, dtype=torch.bfloat16))
    assert (module.weight.grad[0] < 1000).all()


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_of_a_layer_norm_are_those_of_float64_rounded_once(has_bias):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 2000, WIDTH, generator=draw).bfloat16()
    gradient = (1 + torch.randn(4, 2000, WIDTH, generator=draw)).bfloat16()
    found, plain = (nn.LayerNorm(WIDTH, bias=has_bias).bfloat16() for _ in range(2))
    exact = nn.LayerNorm(WIDTH, bias=has_bias).double()
    sum_gradients_in_float32([found])
    inputs = [rows.clone().requires_grad_(), rows.clone().requires_grad_(), rows.double().requires_grad_()]
    outputs = [module(each) for module, each in zip((found, plain, exact), inputs, strict=True)]
    for output in outputs:
        output.backward(gradient.to(output.dtype))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for name, parameter in found.named_parameters():
        # Half a unit in the last of 8 bits.
        torch.testing.assert_close(parameter.grad.double(), exact.get_parameter(name).grad, rtol=2**-8, atol=1e-3)


def test_torch_itself_still_loses_gradients_of_layer_norms():
    """If this fails, torch sums in float32, and the replacement can be removed for that release."""
    module = nn.LayerNorm(WIDTH).bfloat16()
    module(torch.randn(8192, WIDTH).bfloat16()).backward(torch.ones(8192, WIDTH, dtype=torch.bfloat16))
    assert (module.bias.grad < 4000).all()
