"""Packed linear layers compute what the plain ones do, and one product serves the layers that read the same input."""

import pytest
import torch
from torch import nn

from rl_backends_hf.sampling.packed_linears import packed_linears, padded_rows

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Sums of 32 products of numbers below 1: their order, and one rounding to bfloat16."""


class Block(nn.Module):
    def __init__(self, *, bias, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, size in {"q_proj": 16, "k_proj": 8, "v_proj": 8, "gate_proj": 24, "up_proj": 24, "down_proj": 12}.items():
            layer = nn.Linear(32, size, bias=bias, dtype=dtype)
            for parameter in layer.parameters():
                parameter.data = (torch.rand(parameter.shape, generator=generator) - 0.5).to(dtype)
            self.add_module(name, layer)

    def forward(self, x, y):
        attention = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return [*attention, self.up_proj(y), self.gate_proj(y), self.down_proj(x), self.q_proj(x)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@torch.inference_mode()
def test_packed_layers_compute_what_plain_layers_compute(bias, dtype):
    block = Block(bias=bias, dtype=dtype)
    inputs = [torch.rand(3, 1, 32, dtype=dtype) for _ in range(4)]
    expected = [block(*inputs[:2]), block(*inputs[2:])]
    with packed_linears(block, rows=3, steps=50):
        found = [block(*inputs[:2]), block(*inputs[2:])]
    assert all(layer.forward.__func__ is nn.Linear.forward for layer in block.children())
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


def test_products_have_few_different_numbers_of_rows():
    rows = range(1, 4097)
    assert all(count <= padded_rows(count) <= 1.25 * count for count in rows)
    assert [padded_rows(count) for count in range(1, 9)] == list(range(1, 9))
    assert len(set(map(padded_rows, rows))) <= 48


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@torch.inference_mode()
def test_padded_rows_do_not_change_a_product(dtype):
    layer = nn.Linear(32, 24, dtype=dtype)
    inputs = 0.5 * torch.rand(3, 11, 32, dtype=dtype).sub(0.5)  # 33 rows are computed as 40
    expected = layer(inputs)
    with packed_linears(layer, rows=16, steps=50):
        torch.testing.assert_close(layer(inputs), expected, atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(layer(inputs.transpose(0, 1)), expected.transpose(0, 1), atol=TOLERANCE[dtype], rtol=0)


@torch.inference_mode()
def test_layers_that_read_the_same_input_are_one_product():
    block = Block(bias=False, dtype=torch.float32)
    x, y = torch.rand(2, 3, 1, 32)
    with packed_linears(block, rows=3, steps=50), torch.profiler.profile() as profile:
        block.q_proj(x), block.k_proj(x), block.v_proj(x)
        block.gate_proj(x), block.up_proj(x)
        # Another input in between: nothing stale is returned.
        block.gate_proj(x), block.gate_proj(y)
        torch.testing.assert_close(block.up_proj(x), x @ block.up_proj.weight.T)
    [products] = [entry.count for entry in profile.key_averages() if entry.key == "mkldnn::_linear_pointwise"]
    assert products == 1 + 1 + 3


@torch.inference_mode()
def test_few_steps_and_layers_with_hooks_are_left_alone():
    block = Block(bias=False, dtype=torch.float32)
    block.k_proj.register_forward_hook(lambda module, arguments, output: output + 1)
    x = torch.rand(3, 1, 32)
    with packed_linears(block, rows=3, steps=2):
        assert "forward" not in block.q_proj.__dict__
    with packed_linears(block, rows=3, steps=50):
        assert "forward" in block.q_proj.__dict__
        torch.testing.assert_close(block.k_proj(x), x @ block.k_proj.weight.T + 1)
