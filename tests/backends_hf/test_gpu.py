"""The policy on a GPU, real and simulated: results equal to a CPU, memory that is released, and resuming."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util

import pytest
import torch
import transformers
from simulated_gpu import SimulatedGpu

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.cluster import RayVirtualCluster

REAL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 3
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "eps": 1e-3}}
"""Adam divides by the gradient's size; this eps keeps rounding in tiny gradients from becoming whole steps."""


@pytest.fixture(params=[pytest.param("real", marks=REAL), "simulated"])
def gpu(request):
    """The GPU of a test; None if it is a real one."""
    if request.param == "real":
        yield None
        return
    with SimulatedGpu().active() as simulated:
        yield simulated


@pytest.fixture
def start(parts, model_folder):
    """A separate worker with a tiny model on a device."""

    def started(device, kind="llama-tied", **fields):
        context = dataclasses.replace(parts.make_context(), device=device)
        worker = HFPolicyWorker(context, parts.make_config(model_folder(kind), optimizer=ADAMW, **fields))
        worker.setup()
        return worker

    return started


@pytest.fixture
def train(parts):
    """`STEPS` optimizer steps, each on different rows; the results of the last."""

    def trained(worker, first=0):
        for step in range(first, first + STEPS):
            rows = parts.make_rows(seed=step)
            results = worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        return results

    return trained


def weights(worker):
    return {name: tensor.float().cpu() for name, tensor in worker.iter_weights()}


def assert_close(one, other, *, atol):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


FULL = pytest.mark.full("test_a_gpu_scores_and_steps_as_a_cpu_does[llama-tied] has the same steps")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["llama-tied", pytest.param("qwen2", marks=FULL), pytest.param("qwen3", marks=FULL)])
def test_a_gpu_scores_and_steps_as_a_cpu_does(gpu, start, train, parts, kind, packing):
    fields = {"sequence_packing": {"enabled": packing, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
    on_cpu, on_gpu = (start(device, kind, precision="float32", **fields) for device in ("cpu", "cuda"))
    rows = parts.make_rows()
    # Float32 on both; sums of another order differ in the sixth digit.
    torch.testing.assert_close(on_gpu.get_logprobs(rows)["logprobs"], on_cpu.get_logprobs(rows)["logprobs"], rtol=0, atol=2e-4)
    [expected], [found] = train(on_cpu), train(on_gpu)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    # A step is at most 1e-3, so this is a twentieth of one.
    assert_close(weights(on_gpu), weights(on_cpu), atol=5e-5)


def test_bfloat16_weights_have_float32_masters_that_move_as_those_of_a_cpu(gpu, start, train):
    on_cpu, on_gpu = (start(device, precision="bfloat16") for device in ("cpu", "cuda"))
    train(on_cpu)
    train(on_gpu)
    for name, master in on_gpu.state.masters.parameters.items():
        assert master.dtype == torch.float32
        assert master.device.type == "cuda"
        # Gradients in bfloat16 have two to three digits, and a step is at most 1e-3.
        torch.testing.assert_close(master.cpu(), on_cpu.state.masters.parameters[name], rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rows_packed_for_flash_attention_score_as_padded_rows_by_sdpa(start, parts, kind):
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    plain = start("cuda", kind, precision="bfloat16")
    packed = start(
        "cuda", kind, precision="bfloat16", sequence_packing=packing, hf={"attn_implementation": "flash_attention_2"}
    )
    rows = parts.make_rows()
    # Two kernels in bfloat16, with log-probabilities that differ by nats: attention to another row would be off by tenths.
    torch.testing.assert_close(packed.get_logprobs(rows)["logprobs"], plain.get_logprobs(rows)["logprobs"], rtol=0, atol=0.1)


@pytest.fixture
def large(gpu, tmp_path):
    """Folder of a model with enough parameters to measure its memory: a hundred million on a real GPU."""
    width = 1024 if gpu is None else 128
    config = transformers.LlamaConfig(
        vocab_size=32 * width, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=16
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return str(tmp_path)


def test_memory_released_for_the_engine_is_free_for_other_processes_and_restored_unchanged(gpu, parts, train, large):
    context = dataclasses.replace(parts.make_context(), device="cuda")
    worker = HFPolicyWorker(context, parts.make_config(large, precision="bfloat16", optimizer=ADAMW))
    size = worker.setup()["num_parameters"]
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved() - 6 * size
    train(worker)
    before = weights(worker)
    assert torch.cuda.memory_reserved() - others > 14 * size, "weights, float32 copies and two moments"
    worker.offload_before_refit()
    assert torch.cuda.memory_reserved() - others < 3 * size, "the weights stay, to be sent"
    worker.offload_after_refit()
    assert torch.cuda.memory_reserved() - others < 1 * size
    worker.prepare_for_training()
    assert {parameter.device.type for parameter in worker.model.parameters()} == {"cuda"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(worker).items())
    train(worker, first=STEPS)


def test_training_is_unchanged_by_offloading_for_each_refit(gpu, start, train):
    plain, moved = start("cuda"), start("cuda")
    for first in (0, STEPS):
        train(plain, first)
        moved.prepare_for_training()
        train(moved, first)
        moved.finish_training()
        moved.offload_before_refit()
        moved.offload_after_refit()
    assert_close(weights(moved), weights(plain), atol=1e-6)


def test_a_resume_on_a_gpu_equals_an_uninterrupted_run(gpu, start, train, tmp_path):
    plain = start("cuda")
    train(plain)
    plain.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    train(plain, first=STEPS)
    resumed = start("cuda")
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert {state["step"].device.type for state in resumed.state.optimizer.state.values()} == {"cuda"}
    train(resumed, first=STEPS)
    assert_close(weights(resumed), weights(plain), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_in_this_process_takes_the_gpu_also_under_a_device_map(model_folder, parts):
    for fields in ({}, {"device_map": "cuda"}, *([{"device_map": "auto"}] if torch.cuda.device_count() == 1 else [])):
        policy = HuggingFacePolicy(model_name=model_folder("llama"), torch_dtype="float32", **fields)
        assert policy.facts["device"].startswith("cuda")
        assert torch.isfinite(policy.get_logprobs(parts.make_rows())["logprobs"]).all()
        policy.shutdown()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mode", ["replicate", "fsdp2"])
def test_two_gpus_step_as_one_cpu_does(start, train, model_folder, parts, mode):
    on_cpu = start("cpu", precision="float32")
    train(on_cpu)
    with RayVirtualCluster([2], use_gpus=True) as cluster:
        config = parts.make_config(model_folder("llama-tied"), optimizer=ADAMW, precision="float32", hf={"data_parallel": mode})
        policy = HuggingFacePolicy(config=config, cluster=cluster)
        try:
            for step in range(STEPS):
                policy.train(parts.make_rows(seed=step), parts.NLL())
                policy.offload_before_refit()
                policy.offload_after_refit()
            rows = parts.make_rows()
            found, expected = policy.get_logprobs(rows)["logprobs"], on_cpu.get_logprobs(rows)["logprobs"]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        finally:
            policy.shutdown()
