"""Code of the second process in GPU tests; a separate module because it is imported there."""

from __future__ import annotations

import traceback

import pytest
import torch

from rl_core.errors import WeightSyncError
from rl_core.weights.collective import WeightCollective
from rl_core.weights.cuda_ipc import open_buffer
from rl_core.weights.manifest import manifest_of, split_into_buckets

MIB = 2**20
SHAPES = {f"layer.{number}.weight": (513, 257 + number) for number in range(12)}
ROUNDS = 3


def weights_of(version):
    """The same bfloat16 tensors in every process, different for each version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def send(collective):
    for version in range(ROUNDS):
        weights = {name: tensor.cuda() for name, tensor in weights_of(version).items()}
        manifest = manifest_of(weights)
        buckets = split_into_buckets(manifest, budget_bytes=2**20)
        assert len(buckets) > 3
        collective.send(manifest, buckets, iter(weights.items()), refit=str(version), version=version)


def receive(collective):
    for version in range(ROUNDS):
        found = {}

        def load(tensors, refit, stated, found=found, version=version):
            assert stated == version
            found.update((name, tensor.cpu().clone()) for name, tensor in tensors.items())

        collective.receive(load)
        expected = weights_of(version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def run_rank(rank, place, device, peer_dies, outbox):
    try:
        torch.cuda.set_device(device)
        collective = WeightCollective(*place, 2, rank=rank, device="cuda", timeout_s=20.0 if peer_dies else 120.0)
        collective.join()
        if not peer_dies:
            (send if rank == 0 else receive)(collective)
        elif rank == 0:
            with pytest.raises(WeightSyncError, match="broadcast of weights failed"):
                send(collective)
        outbox.put((rank, collective._device.type))
        collective.close()
    except BaseException:
        outbox.put((rank, traceback.format_exc()))


def read_buckets(inbox, outbox):
    """Sums the tensors received until it receives None."""
    while (devices := inbox.get(timeout=120)) is not None:
        opened = open_buffer(devices, torch.device("cuda"))
        outbox.put(int(opened[: 10 * MIB].to(torch.int64).sum()))
        del opened
    outbox.put("done")
