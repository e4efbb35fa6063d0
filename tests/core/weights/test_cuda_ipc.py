"""GPU buffers that another process maps; tests that need no GPU run everywhere."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
from functools import partial

import pytest
import torch
from gpu_processes import MIB, read_buckets
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rl_core.errors import WeightSyncError
from rl_core.weights import cuda_ipc
from rl_core.weights.cuda_ipc import GpuBuffer, device_uuid, merge_handles, open_buffer
from rl_core.weights.source import BufferPair

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gpu_buffers(device):
    return BufferPair(partial(GpuBuffer, device=torch.device(device)))


def test_buffers_alternate_and_grow_as_needed():
    pair = gpu_buffers("cpu")
    first, second = pair.next(100), pair.next(100)
    assert first is not second
    assert pair.next(50) is first
    assert pair.next(200).bytes.numel() == 200
    pair.close()
    pair.close()
    assert second.bytes.numel() == 0


def test_torch_rebuilds_from_the_arguments_that_are_changed_and_read_here():
    known = inspect.signature(rebuild_cuda_tensor).parameters.keys()
    assert {"storage_device", "ref_counter_handle", "ref_counter_offset"} <= known


def test_a_cpu_receiver_reports_that_the_weights_are_on_a_gpu():
    with pytest.raises(WeightSyncError, match="computes on the CPU"):
        open_buffer({}, torch.device("cpu"))


def test_each_engine_process_of_a_colocated_cluster_opens_the_buffer_of_its_gpu_on_any_node(monkeypatch):
    gpus = [f"GPU-{node}-{index}" for node in range(2) for index in range(8)]
    buffers = {gpu: torch.empty(0, dtype=torch.uint8) for gpu in gpus}

    def rebuild(storage_device, gpu):
        assert storage_device == 0, "each process sees only its own GPU"
        return buffers[gpu]

    per_rank = [
        {"kind": "cuda_ipc", "devices": {gpu: {"name": f"buffer of {gpu}", "rebuild": rebuild, "arguments": (5, gpu)}}}
        for gpu in gpus
    ]
    handles = merge_handles(per_rank)
    for gpu in [*gpus, "GPU-2-0"]:
        monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device, gpu=gpu: gpu)
        if gpu in buffers:
            assert open_buffer(handles["devices"], torch.device("cuda", 0)) is buffers[gpu]
        else:
            with pytest.raises(WeightSyncError, match=r"on GPU GPU-2-0, but .*refit_transport: collective"):
                open_buffer(handles["devices"], torch.device("cuda", 0))


@pytest.fixture
def reader():
    """(send, receive) of another process that opens the handles it receives."""
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=read_buckets, args=(inbox, outbox), daemon=True)
    process.start()
    yield inbox.put, lambda: outbox.get(timeout=120)
    process.kill()
    process.join()


def fill_and_hand_over(pair, value):
    device = torch.device("cuda", 0)
    buffer = pair.next(10 * MIB)
    buffer.bytes.fill_(value)
    return {device_uuid(device): buffer.handle()}


@pytest.mark.gpu
@needs_gpu
def test_another_process_reads_each_bucket_unchanged(reader):
    send, receive = reader
    pair = gpu_buffers("cuda:0")
    try:
        for value in range(1, 8):
            send(fill_and_hand_over(pair, value))
            assert receive() == value * 10 * MIB
        send(None)
        assert receive() == "done"
    finally:
        pair.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("opened", [0, 3])
def test_memory_is_freed_after_any_number_of_openings(reader, opened):
    send, receive = reader
    torch.ones(1, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        pair = gpu_buffers("cuda:0")
        devices = fill_and_hand_over(pair, 1)
        for _ in range(opened):
            send(devices)
            receive()
        pair.close()
        del devices, pair
        gc.collect()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@needs_gpu
def test_the_owner_of_a_buffer_can_read_it_too():
    pair = gpu_buffers("cuda:0")
    opened = open_buffer(fill_and_hand_over(pair, 3), torch.device("cuda", 0))
    assert int(opened.to(torch.int64).sum()) == 3 * 10 * MIB
    pair.close()


@pytest.mark.gpu
@needs_gpu
def test_a_receiver_on_another_gpu_is_referred_to_the_collective_transport():
    pair = gpu_buffers("cuda:0")
    [handle] = fill_and_hand_over(pair, 1).values()
    with pytest.raises(WeightSyncError, match="refit_transport: collective"):
        open_buffer({"another GPU": handle}, torch.device("cuda", 0))
    pair.close()
