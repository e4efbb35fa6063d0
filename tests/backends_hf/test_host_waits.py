"""How often the host waits for the GPU: at most once per decoded token, per scored microbatch and per bucket of a refit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from simulated_gpu import SimulatedGpu

from rl_backends_base import SamplingParameters, row_sampler
from rl_backends_base.token_choice import next_tokens
from rl_backends_hf.config import HFGenerationConfig, HFSamplerConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_backends_hf.sampling.sampler import Sampler
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.batched_data_dict import BatchedDataDict

NEW_TOKENS = 10
"""Too few for packed weights, with which the CPU would add in another order."""


@pytest.fixture
def gpu():
    with SimulatedGpu().active() as simulated:
        yield simulated


@pytest.fixture
def start(gpu, parts, model_folder):
    """A policy worker on the GPU."""

    def started(**fields):
        context = dataclasses.replace(parts.make_context(), device="cuda")
        worker = HFPolicyWorker(context, parts.make_config(model_folder("llama-tied"), **fields))
        worker.setup()
        return worker

    return started


def prompts():
    """Prompts of unequal lengths, two of them equal, whose rows end at different tokens."""
    lengths = torch.tensor([5, 9, 9, 3, 7, 7])
    ids = torch.randint(3, 160, (6, 9), generator=torch.Generator().manual_seed(3))
    ids[2] = ids[1]
    ids[torch.arange(9) >= lengths.unsqueeze(1)] = 0
    limits = torch.tensor([NEW_TOKENS, 3, 8, NEW_TOKENS, 8, 5])
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "sample_seeds": torch.arange(6), "max_new_tokens": limits}
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2}],
    ids=["plain", "filtered"],
)
def test_sampling_waits_once_per_token_and_gives_the_tokens_of_a_cpu(gpu, model_folder, monkeypatch, settings):
    draws = []
    monkeypatch.setattr(row_sampler, "next_tokens", lambda *_, **kwargs: draws.append(1) or next_tokens(*_, **kwargs))

    def sampler(model):
        hf_cfg = {"max_batch_rows": 4, "repetition_penalty": settings.get("repetition_penalty", 1.0)}
        shape = {key: value for key, value in settings.items() if key != "repetition_penalty"}
        return Sampler(model, HFGenerationConfig(max_new_tokens=NEW_TOKENS, hf_cfg=hf_cfg, **shape))

    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama-tied"))
    expected = sampler(model).generate(prompts())
    model.to("cuda")
    on_gpu = sampler(model)
    draws.clear()
    with gpu.counting() as waits:
        sampled = on_gpu.generate(prompts())
    assert torch.equal(sampled["output_ids"], expected["output_ids"])
    # Some last bits of scores around 8 (2^-21 each): SDPA, and the products that a CPU uses instead, add in another order.
    torch.testing.assert_close(sampled["logprobs"], expected["logprobs"], rtol=0, atol=5e-6)
    assert waits.total() <= len(draws), waits


def test_top_p_over_a_large_vocabulary_does_not_wait_for_how_many_tokens_it_keeps(gpu):
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(5))
    logits[:4] *= 8  # few tokens reach top_p in the first rows, and more than 1024 are needed in the others
    rows = {"seeds": torch.arange(8), "positions": torch.full((8,), 4)}
    parameters = SamplingParameters(top_p=0.9, top_k=2500)
    expected = next_tokens(logits.clone(), parameters=parameters, greedy=False, **rows)
    on_gpu = {name: tensor.to("cuda") for name, tensor in {**rows, "logits": logits}.items()}
    with gpu.counting() as waits:
        tokens, logprobs, _ = next_tokens(on_gpu.pop("logits"), parameters=parameters, greedy=False, **on_gpu)
    assert waits.total() == 0, waits
    assert torch.equal(tokens.cpu(), expected[0])
    torch.testing.assert_close(logprobs.cpu(), expected[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_scoring_and_training_wait_once_per_microbatch(gpu, start, parts, packing):
    budget = {"enabled": packing, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    worker = start(sequence_packing=budget, logprob_batch_size=2, train_micro_batch_size=2)
    rows = parts.make_rows(12)
    microbatches = len(list(worker._splitter.split(rows, rows=2)))
    assert microbatches > 2
    with gpu.counting() as waits:
        worker.get_logprobs(rows)
    assert waits.total() <= microbatches + 1, waits
    with gpu.counting() as waits:
        worker.get_topk_logprobs(rows, k=3)
    assert waits.total() <= microbatches + 1, waits
    with gpu.counting() as waits:
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    assert waits.total() <= microbatches + 1, waits


def test_a_refit_waits_once_per_bucket_on_each_side_and_once_per_fingerprint(gpu, start, model_folder, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (print, ()))
    monkeypatch.setattr("rl_core.weights.cuda_ipc.GpuBuffer.close", lambda _: None)  # torch's receivers are not simulated
    policy, context = start(), start().context
    section = HFGenerationConfig(
        model_name=model_folder("llama-tied"), max_new_tokens=4, hf_cfg=HFSamplerConfig(precision="bfloat16")
    )
    engine = HFGenerationWorker(context, section)
    engine.setup()
    dtypes = engine.prepare_refit_info(policy.prepare_refit_info())
    buckets = policy.prepare_weights_for_ipc(8192, receiver_dtypes=dtypes)
    assert len(buckets) > 3
    for bucket in buckets:
        with gpu.counting() as waits:
            handles = policy.get_weights_ipc_handles(bucket)
        assert waits.total() <= 1, waits
        with gpu.counting() as waits:
            engine.update_weights(handles)
        assert waits.total() <= 1, waits
    policy.finish_refit()
    with gpu.counting() as waits:
        expected = policy.weight_fingerprint(dtypes=dtypes, kind="wsum")
    assert waits.total() == 1, waits
    with gpu.counting() as waits:
        assert engine.weight_fingerprint() == expected
    assert waits.total() == 1, waits


def test_offloading_waits_once_per_move_and_pins_host_memory_only_once(gpu, start, parts):
    worker = start(precision="bfloat16", optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}})
    rows = parts.make_rows()

    def refit():
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        before = {name: tensor.cpu() for name, tensor in worker.trained_weights()}
        pinned = gpu.pinned
        with gpu.counting() as waits:
            worker.offload_before_refit()
            worker.offload_after_refit()
        pinned, resident = gpu.pinned - pinned, torch.cuda.memory_allocated()
        with gpu.counting() as waits_to_restore:
            worker.prepare_for_training()
        assert waits_to_restore.total() == 0, waits_to_restore
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in worker.trained_weights())
        return pinned, waits.total(), resident

    pinned, *_ = refit()
    assert pinned > 20, "weights, masters and moments"
    pinned, waits, resident = refit()
    assert (pinned, waits) == (0, 2)
    assert resident < 100, "step counts at most"


def test_the_reference_is_copied_to_the_gpu_for_each_scoring_and_never_back(gpu, start, parts):
    worker, rows = start(), parts.make_rows()
    plain = worker.get_logprobs(rows)["logprobs"]
    worker.get_logprobs(rows, reference=True)
    copies, pinned = gpu.copies.copy(), gpu.pinned
    worker.get_logprobs(rows)
    without = gpu.copies - copies
    inputs_pinned, copies, pinned = gpu.pinned - pinned, gpu.copies.copy(), gpu.pinned
    assert torch.equal(worker.get_logprobs(rows, reference=True)["logprobs"], plain)
    with_reference = gpu.copies - copies
    weights = len(list(worker.model.parameters())) + len(list(worker.model.buffers()))
    assert with_reference["to cpu"] == without["to cpu"]
    assert with_reference["to cuda"] == without["to cuda"] + weights
    assert gpu.pinned - pinned == inputs_pinned


def test_the_peak_memory_of_a_phase_is_that_of_the_allocator_and_takes_no_wait(gpu, start, parts):
    worker, rows = start(), parts.make_rows()
    worker.take_peak_memory()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    peak = gpu.peak
    with gpu.counting() as waits:
        assert worker.take_peak_memory() == peak > gpu.allocated
    assert not waits
    worker.get_logprobs(rows)
    assert gpu.allocated < worker.take_peak_memory() < peak, "scoring needs no gradients"
