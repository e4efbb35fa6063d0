"""The simulated GPU that other tests run on: what raises, what waits, and what non-blocking copies contain."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import CUDA, SimulatedGpu


@pytest.fixture
def gpu():
    with SimulatedGpu().active() as simulated:
        yield simulated


def operations(counted):
    return {operation.rpartition(" ")[0]: number for operation, number in counted.items()}


def test_tensors_on_both_devices_cannot_be_combined(gpu):
    one, other = torch.ones(3, device="cuda"), torch.ones(3)
    assert (one.device, other.device) == (CUDA, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        one + other
    assert (one + torch.tensor(1.0)).device == CUDA, "numbers are arguments of kernels"
    with pytest.raises(TypeError, match="numpy"):
        one.numpy()
    with pytest.raises(NotImplementedError, match="only for CPUs"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[torch.ones(1, 1, 2, 2, device="cuda")] * 3)


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda x: x.tolist(), {"tolist": 1}),
        (lambda x: x.sum().item(), {"_local_scalar_dense": 1}),
        (lambda x: bool(x.any()), {"_local_scalar_dense": 1}),
        (lambda x: x.cpu(), {"copy to cpu": 1}),
        (lambda x: x[[0, 2]], {"index on the host": 1}),
        (lambda x: x[x > 0], {"index by a mask": 1}),
        (lambda x: x.nonzero(), {"nonzero": 1}),
        (lambda x: torch.tensor([1, 2], device=x.device), {"copy to cuda": 1}),
        (lambda x: torch.ones(2).to(x.device, non_blocking=True), {"copy to cuda": 1}),
        (lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True), {}),
        (lambda x: torch.zeros_like(x).copy_(x)[1:].add_(1).view(-1).to(torch.bfloat16), {}),
        (lambda x: x[torch.arange(2, device=x.device)], {}),
    ],
)
def test_the_host_waits_for_copies_and_for_values(gpu, operation, waits):
    values = torch.arange(4.0, device="cuda")
    with gpu.counting() as counted:
        operation(values)
    assert operations(counted) == waits


def test_a_copy_to_the_host_contains_garbage_until_the_host_waits(gpu):
    values = torch.arange(3.0, device="cuda")
    copied = values.to("cpu", non_blocking=True)
    values.zero_()
    assert copied.isnan().all()
    torch.cuda.synchronize()
    assert copied.tolist() == [0.0, 1.0, 2.0], "copies are in the order of other operations"


def test_pinned_memory_must_not_change_before_it_was_copied(gpu):
    pinned = torch.ones(3).pin_memory()
    copied = torch.empty(3, device="cuda").copy_(pinned, non_blocking=True)
    pinned.zero_()
    with pytest.raises(AssertionError, match="pinned memory was changed"):
        copied.tolist()


def test_memory_is_that_of_all_storages_and_has_a_peak(gpu):
    values = torch.zeros(256, device="cuda")
    view = values[:2]
    del values
    assert torch.cuda.memory_allocated() == 1024
    (view + view).sum()
    del view
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 1024 + 8 + 4)


def test_gradients_and_optimizer_states_are_on_the_gpu(gpu):
    layer = torch.nn.Linear(3, 3).to("cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 3, device="cuda")).square().sum().backward()
    optimizer.step()
    assert layer.weight.grad.device == CUDA
    assert {value.device for state in optimizer.state.values() for value in state.values()} == {CUDA}
