"""Keys and values of the rows that are decoded together stay within their memory limit."""

from __future__ import annotations

import pytest
import torch
import transformers
from simulated_gpu import SimulatedGpu

from rl_backends_base.row_sampler import DecodeLoop
from rl_backends_hf import HuggingFaceGeneration
from rl_backends_hf.config import HFGenerationConfig, HFSamplerConfig
from rl_backends_hf.sampling.cache_budget import CacheBudget
from rl_backends_hf.sampling.sampler import Sampler
from rl_core.data.batched_data_dict import BatchedDataDict

KINDS = ("llama", "gpt2", "qwen3")


@pytest.fixture
def sizes(monkeypatch):
    """Rows that are decoded, and bytes of their keys and values, after each step of a loop."""
    found, step = [], DecodeLoop.step

    def observed(loop, weight_version):
        ended = step(loop, weight_version)
        if (cache := loop._model._cache) is not None:
            allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
            found.append((len(loop._active), allocated))
        return ended

    monkeypatch.setattr(DecodeLoop, "step", observed)
    return found


def prompts():
    """Short and long rows; a long one comes last, when short ones have begun."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 4, 5, 3, 4, 20, 5, 24])
    ids = torch.randint(3, 160, (8, 24), generator=generator)
    ids[torch.arange(24) >= lengths.unsqueeze(1)] = 0
    limits = torch.tensor([12, 12, 12, 8, 12, 30, 12, 36])
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "sample_seeds": torch.arange(8), "max_new_tokens": limits}
    )


def sampler_of(model, limit=None):
    """A sampler with a limit of bytes."""
    return Sampler(model, HFGenerationConfig(max_new_tokens=36, hf_cfg={"kv_cache_gib": limit and limit / 2**30}))


def bytes_of(model, tokens):
    """Bytes of the keys and values of `tokens` tokens, from the cache of the model itself."""
    cache = model(torch.zeros(1, 4, dtype=torch.int64), use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) * tokens // 4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_wait_until_keys_and_values_fit_into_the_limit(sizes, model_folder, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind)).eval()
    unlimited = sampler_of(model).generate(prompts())
    assert max(rows for rows, _ in sizes) == 8
    sizes.clear()
    limit = bytes_of(model, 2 * 60)  # two of the longest rows, of 24 + 36 tokens
    sampled = sampler_of(model, limit).generate(prompts())
    assert sizes[0][0] == 2, "all rows count as the longest one, until it has ended"
    assert max(allocated for _, allocated in sizes) <= limit
    assert torch.equal(sampled["output_ids"], unlimited["output_ids"])
    torch.testing.assert_close(sampled["logprobs"], unlimited["logprobs"], rtol=0, atol=1e-5)


def test_a_longer_row_that_arrives_later_does_not_exceed_the_limit(sizes, model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    limit = bytes_of(model, 5 * 17)
    sampler = sampler_of(model, limit)
    rows = sampler.rows.read(prompts(), greedy=True)
    with sampler.prepared(rows=8, steps=36), sampler.without_gradients():
        loop = DecodeLoop(sampler, frozenset(), vocab_size=sampler.vocab_size)
        loop.add(rows[:5])
        ended = loop.step(0)
        loop.add(rows[5:])
        while not loop.is_idle:
            ended += loop.step(0)
    assert sorted(row.prompt.number for row in ended) == list(range(8))
    assert max(count for count, _ in sizes) == 5
    assert max(allocated for _, allocated in sizes) <= limit


def test_one_row_is_decoded_even_if_it_exceeds_the_limit(model_folder):
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=36, kv_cache_gib=1e-9)
    assert engine.generate(prompts(), greedy=True)["generation_lengths"].min() > 0
    engine.shutdown()


def test_on_a_gpu_the_limit_follows_from_the_memory_that_is_free(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    row = bytes_of(model, 60)
    with SimulatedGpu().active() as gpu:
        model.to("cuda")
        gpu.total = torch.cuda.memory_allocated() + 10 * row
        budget = CacheBudget(model, HFSamplerConfig())
        budget.measure()
        assert budget.rows(longest=60) == 8
        assert budget.rows(longest=10**6) == 1
    assert not CacheBudget(
        transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")), HFSamplerConfig()
    ).is_limited
