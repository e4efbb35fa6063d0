"""The weight collective between GPU processes: NCCL with one GPU each, gloo on a shared GPU."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from gpu_processes import run_rank

from rl_core.rendezvous.interfaces import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ONE_EACH = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def two_ranks(devices, *, peer_dies=False):
    """The devices reported by both ranks."""
    place = ("127.0.0.1", free_port("127.0.0.1"))
    spawn = multiprocessing.get_context("spawn")
    outbox = spawn.Queue()
    ranks = [
        spawn.Process(target=run_rank, args=(rank, place, device, peer_dies, outbox), daemon=True)
        for rank, device in enumerate(devices)
    ]
    for process in ranks:
        process.start()
    try:
        return dict(outbox.get(timeout=180) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


@ONE_EACH
def test_ranks_with_a_gpu_each_meet_over_nccl_and_receive_every_version():
    assert two_ranks([0, 1]) == {0: "cuda", 1: "cuda"}


def test_ranks_that_share_a_gpu_meet_over_gloo_since_nccl_refuses_them():
    assert two_ranks([0, 0]) == {0: "cpu", 1: "cpu"}


@ONE_EACH
def test_a_rank_raises_and_survives_when_its_peer_leaves():
    assert two_ranks([0, 1], peer_dies=True) == {0: "cuda", 1: "cuda"}
