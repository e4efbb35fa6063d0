"""Models whose layers keep something other than keys and values compute prompts without padding, and then all rows together."""

import asyncio

import pytest
import torch
import transformers
from family_configs import hybrid_config

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling.cohorts import Cohort
from rl_backends_hf.sampling.sampler import Sampler, probe_sampling
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError, WorkerError
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport

FAMILIES = ("qwen3_next", "falcon_h1", "lfm2")
"""A gated delta rule next to attention, Mamba 2 and attention in each layer, and convolutions next to attention."""
LIMIT = 16
TOLERANCE = 3e-4
"""A recurrence is summed in chunks without a cache and token by token with it; a wrong state shows as tenths."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def write(family, seed=3):
        config = hybrid_config(family)
        config.eos_token_id = None
        folder = tmp_path_factory.mktemp(family)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture(scope="module", params=[FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])])
def folder(request, folder_of):
    return folder_of(request.param)


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch_of(*prompts, **columns):
    width = max(map(len, prompts))
    return BatchedDataDict(
        input_ids=torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts]),
        input_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        sample_seeds=torch.arange(len(prompts)) * 31 + 8,
        **columns,
    )


BATCH = batch_of([5, 6, 7], [9], [5, 6, 7], [11, 12], [9], [3, 4, 5, 6, 8, 9])


def sampler_of(model, **settings):
    return Sampler(model, HFGenerationConfig(max_new_tokens=LIMIT, **settings))


def logprobs_of(model, ids):
    """[T] of a plain forward pass over one row; 0 for its first token."""
    with torch.no_grad():
        scores = model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
    return torch.cat([torch.zeros(1), scores.gather(1, ids[1:, None])[:, 0]])


def rows_of(output):
    """Tokens, log-probabilities and length of the prompt of each row."""
    ends, new = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    for row, (end, sampled) in enumerate(zip(ends, new, strict=True)):
        yield output["output_ids"][row, :end], output["logprobs"][row, :end], end - sampled


def test_greedy_rows_equal_transformers_generate(model):
    for ids, _, prompt in rows_of(sampler_of(model).generate(BATCH, greedy=True)):
        expected = model.generate(ids[None, :prompt], max_new_tokens=LIMIT, do_sample=False)
        assert ids.tolist() == expected[0].tolist()


def test_log_probabilities_equal_a_plain_forward_pass_when_rows_leave_early(model):
    limits = torch.tensor([16, 3, 9, 16, 5, 12])
    output = sampler_of(model).generate(BatchedDataDict({**BATCH, "max_new_tokens": limits}))
    assert output["generation_lengths"].tolist() == limits.tolist()
    for ids, logprobs, prompt in rows_of(output):
        torch.testing.assert_close(logprobs[prompt:], logprobs_of(model, ids)[prompt:], atol=TOLERANCE, rtol=0)


def test_rows_do_not_depend_on_how_many_are_decoded_together(model):
    expected = sampler_of(model).generate(BATCH)
    for settings in ({"max_batch_rows": 1}, {"max_batch_rows": 2}, {"kv_cache_gib": 2**-19}):
        found = sampler_of(model, hf_cfg=settings).generate(BATCH)
        assert torch.equal(found["output_ids"], expected["output_ids"])


def shapes_of_passes(model, *prompts):
    """Rows and tokens of each forward pass while two tokens are sampled for each prompt."""
    sampler, calls = Sampler(model, HFGenerationConfig(max_new_tokens=2)), []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        sampler.generate(batch_of(*prompts))
    finally:
        handle.remove()
    return calls


PROMPTS = ([5, 6, 7, 8], [5, 6, 7, 8], [9, 9], [9, 9], [3, 4])


def test_all_rows_share_the_forward_pass_of_a_token_and_those_of_a_prompt_its_prefill(model):
    assert shapes_of_passes(model, *PROMPTS) == [(1, 4), (2, 2), (5, 1)]


def test_rows_with_sparse_attention_share_a_forward_pass_only_if_they_are_equally_long(folder_of):
    sparse = transformers.AutoModelForCausalLM.from_pretrained(folder_of("deepseek_v32"), dtype=torch.float32).eval()
    assert shapes_of_passes(sparse, *PROMPTS) == [(1, 4), (2, 2), (2, 1), (3, 1)]
    for ids, logprobs, prompt in rows_of(sampler_of(sparse).generate(BATCH)):
        torch.testing.assert_close(logprobs[prompt:], logprobs_of(sparse, ids)[prompt:], atol=TOLERANCE, rtol=0)


def test_rows_of_different_lengths_are_computed_apart_if_a_model_reads_their_padding(model, monkeypatch, caplog):
    monkeypatch.setattr(Cohort, "mask", lambda self, device: None)
    sampler = sampler_of(model)
    probe_sampling(sampler)
    assert "sampling is slower" in caplog.text
    for ids, logprobs, prompt in rows_of(sampler.generate(BATCH)):
        torch.testing.assert_close(logprobs[prompt:], logprobs_of(model, ids)[prompt:], atol=TOLERANCE, rtol=0)


def test_prompts_are_scored(model):
    prompt = [5, 9, 31, 7, 7, 20]
    output = sampler_of(model).generate(batch_of(prompt, sampling=[{"prompt_logprobs": 0}]))
    scores = torch.tensor([scored[0][1] for scored in output["prompt_logprobs"][0][1:]])
    torch.testing.assert_close(scores, logprobs_of(model, torch.tensor(prompt))[1:], atol=TOLERANCE, rtol=0)


async def row_of(engine, row):
    [item] = [output async for _, output in engine.generate_async(BATCH.slice(row, row + 1), greedy=False)]
    return item


async def wait_for_tokens(engine, rows):
    """Wait until as many rows have tokens."""
    while sum(1 for row in engine.group.worker._sampler._rows.values() if row.tokens) < rows:
        await asyncio.sleep(0)


def test_rows_that_join_late_and_rows_in_progress_at_a_refit_have_the_log_probabilities_of_their_weights(folder_of):
    trained, old = folder_of("qwen3_next", seed=3), folder_of("qwen3_next", seed=4)
    policy = HuggingFacePolicy(trained, generation={"backend": "hf"})
    engine = HuggingFaceGeneration(old, max_new_tokens=50)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, ByReferenceTransport))

    async def refit_between_tokens():
        tasks = []
        for row in range(3):
            tasks.append(asyncio.create_task(row_of(engine, row)))
            await wait_for_tokens(engine, row + 1)
        engine.prepare_refit_info(policy.prepare_refit_info())
        kept = [len(row.tokens) for row in engine.group.worker._sampler._rows.values()]
        sync.sync()
        return kept, await asyncio.gather(*tasks)

    kept, found = asyncio.run(refit_between_tokens())
    models = [transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (old, trained)]
    for tokens, output in zip(kept, found, strict=True):
        [(ids, logprobs, prompt)] = rows_of(output)
        before, after = (logprobs_of(each, ids) for each in models)
        expected = torch.cat([before[: prompt + tokens], after[prompt + tokens :]])
        assert 1 <= tokens < 50
        torch.testing.assert_close(logprobs[prompt:], expected[prompt:], atol=TOLERANCE, rtol=0)
    engine.shutdown()
    policy.shutdown()


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_packed_rows_would_share_a_recurrence_and_are_refused(parts, folder_of, family):
    config = parts.make_config(folder_of(family), sequence_packing={"enabled": True, "train_mb_tokens": 64})
    with pytest.raises((NotSupportedError, WorkerError), match=r"policy.sequence_packing.enabled: false"):
        HuggingFacePolicy(config=config).wait_ready()


def test_a_wrong_state_is_found_before_a_run_starts(folder, monkeypatch):
    monkeypatch.setattr(transformers.DynamicCache, "reorder_cache", lambda self, numbers: None)
    monkeypatch.setattr(transformers.DynamicCache, "has_previous_state", lambda self, *args: False, raising=False)
    with pytest.raises(WorkerError, match=r"cannot be sampled from|differ by"):
        HuggingFaceGeneration(folder, max_new_tokens=2).wait_ready()
