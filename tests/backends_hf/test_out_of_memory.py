"""Full memory is reported with the phase, what was in memory and the key to change."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import SimulatedGpu

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.cluster import RayVirtualCluster
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.ray_worker_group import RayWorkerGroup
from rl_core.errors import RLCoreError, WorkerError

PACKED = {
    "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 48},
    "max_total_sequence_length": 32,
}
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}}


def message_of(raised) -> str:
    """The text of the error in a worker; the error of torch is its cause."""
    error = raised.value.__cause__
    assert type(error) is RLCoreError
    return str(error)


@pytest.mark.parametrize(
    ("fields", "phase", "key"),
    [
        ({}, "training", "lower `train_micro_batch_size` from 8 to 4; or set `activation_checkpointing: true`"),
        ({"activation_checkpointing": True, **PACKED}, "training", "lower `sequence_packing.train_mb_tokens` from 64 to 32;"),
        (PACKED, "scoring", "lower `sequence_packing.logprob_mb_tokens` from 48 to 32;"),
        ({"train_micro_batch_size": 1, "activation_checkpointing": True}, "training", "train adapters (`hf_cfg.lora: {}`)"),
    ],
)
def test_a_full_gpu_is_reported_with_what_was_on_it_and_the_key_to_change(parts, model_folder, fields, phase, key):
    config = parts.make_config(model_folder("llama-tied"), precision="bfloat16", optimizer=ADAMW, **fields)
    with SimulatedGpu().active() as gpu:
        group = InProcessWorkerGroup(HFPolicyWorker, worker_kwargs={"config": config}, name="policy", device="cuda")
        group.run_all("setup")
        worker, rows = group.worker, parts.make_rows()
        counts = parts.counts_of(rows)
        worker.train(rows, parts.NLL(), counts=counts)
        gpu.total = torch.cuda.memory_allocated() + 16_000
        training = group.submit_all("train", rows, parts.NLL(), counts=counts) if phase == "training" else None
        with pytest.raises(WorkerError) as raised:
            (training or group.submit_all("get_logprobs", rows)).result()
    message = message_of(raised)
    assert message.startswith(f"Out of memory in {phase} (OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    assert key in message
    assert " GiB were, in GiB: weights 0.00, float32 master weights 0.00, " in message
    assert "optimizer state 0.00, activations and others 0.00" in message
    assert isinstance(raised.value.__cause__.__cause__, torch.OutOfMemoryError)


def test_a_gpu_without_memory_for_the_optimizer_state_is_reported_as_full_in_the_optimizer_step(parts, model_folder):
    peaks, rows = [], parts.make_rows(2, 8)
    for optimizer in (parts.SGD, ADAMW):
        config = parts.make_config(model_folder("llama-tied"), optimizer=optimizer)
        with SimulatedGpu().active() as gpu:
            group = InProcessWorkerGroup(HFPolicyWorker, worker_kwargs={"config": config}, device="cuda")
            group.run_all("setup")
            gpu.total, gpu.peak = peaks[0] if peaks else gpu.total, 0
            call = group.submit_all("train", rows, parts.NLL(), counts=parts.counts_of(rows))
            if not peaks:
                call.result()
                peaks.append(gpu.peak)
                continue
            with pytest.raises(WorkerError) as raised:
                call.result()
    message = message_of(raised)
    assert message.startswith("Out of memory in the optimizer step (")
    assert "shard the model over several ranks (`hf_cfg.data_parallel: fsdp2`)" in message
    assert "train_micro_batch_size" not in message, "the state of the optimizer does not depend on the microbatches"


@pytest.mark.slow
@pytest.mark.ray
def test_an_allocation_that_fails_in_a_worker_on_a_cluster_is_reported_to_the_driver(parts, model_folder, local_ray):
    class WithLittleMemory(HFPolicyWorker):  # local, so that the worker does not import this module
        """Its process can allocate one more MiB when it scores, once the threads that compute were started."""

        def get_logprobs(self, data, *, reference=False):
            import resource
            from pathlib import Path

            super().get_logprobs(data.slice(0, 1), reference=reference)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return super().get_logprobs(data, reference=reference)

    config = parts.make_config(model_folder("llama-tied"), logprob_batch_size=512)
    rows = parts.make_rows(512, 250)
    cluster = RayVirtualCluster([1], use_gpus=False)
    group = RayWorkerGroup(cluster, WithLittleMemory, worker_kwargs={"config": config}, name="policy")
    try:
        group.run_all("setup")
        with pytest.raises(WorkerError, match="Out of memory in scoring") as raised:
            group.run_all("get_logprobs", rows)
    finally:
        group.shutdown()
        cluster.shutdown()
    message = message_of(raised)
    assert "allocate memory" in message
    assert "In the host memory of " in message
    assert "weights 0.00" in message
    assert "lower `logprob_batch_size` from 512 to 256" in message


def test_a_full_gpu_of_an_engine_is_reported_with_its_own_keys(parts, model_folder):
    config = HFGenerationConfig(model_name=model_folder("llama-tied"), max_new_tokens=4)
    rows = parts.make_rows()
    with SimulatedGpu().active() as gpu:
        group = InProcessWorkerGroup(HFGenerationWorker, worker_kwargs={"config": config}, name="generation", device="cuda")
        group.run_all("setup")
        gpu.total = torch.cuda.memory_allocated() + 4_000
        with pytest.raises(WorkerError) as raised:
            group.run_all("generate", rows)
    message = message_of(raised)
    assert message.startswith("Out of memory in sampling (")
    assert "Lower `policy.generation.hf_cfg.max_batch_rows` from 256 to 128" in message
