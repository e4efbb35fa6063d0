"""Rows that share a prompt while they decode get the tokens and log-probabilities of rows with a copy each."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_base.row_sampler import DecodeLoop
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling import shared_prompts
from rl_backends_hf.sampling.sampler import Sampler
from rl_backends_hf.sampling.shared_prompts import PromptTable, attend_by_products
from rl_core.data.batched_data_dict import BatchedDataDict

VOCAB_SIZE = 160
PROMPT_OF_ROW = (0, 1, 0, 2, 0, 3, 1, 0)
"""Groups of four rows, two rows and one, and a prompt that is too short to be shared."""
LENGTHS = (23, 16, 20, 7)
MIN_TOKENS = 12
LIMITS = (9, 30, 3, 12, 30, 12, 5, 30)
"""Groups lose rows at different steps; the second ends as a whole before the first."""
LOGPROB_TOLERANCE = 2e-5
"""Sums of up to 50 products in another order, in float32, over two layers."""


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(shared_prompts, "MIN_TOKENS", dict.fromkeys(shared_prompts.MIN_TOKENS, MIN_TOKENS))


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()


def rows_of(prompt_of_row=PROMPT_OF_ROW, limits=LIMITS):
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    return BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence([prompts[number] for number in prompt_of_row], batch_first=True),
        input_lengths=torch.tensor([LENGTHS[number] for number in prompt_of_row]),
        sample_seeds=torch.arange(100, 100 + len(prompt_of_row)),
        max_new_tokens=torch.tensor(limits),
    )


def samplers(model):
    """One that shares prompts and one that does not."""
    both = [Sampler(model, HFGenerationConfig(max_new_tokens=30, hf_cfg={"max_batch_rows": 6})) for _ in range(2)]
    both[1]._sharing.is_supported = False
    return both


@pytest.fixture
def merged(monkeypatch):
    """The number of prompts of each layer's call."""
    counts, attend = [], PromptTable.attend

    def counted(self, query, prompts, *rest, **options):
        counts.append(len(prompts[0]))
        return attend(self, query, prompts, *rest, **options)

    monkeypatch.setattr(PromptTable, "attend", counted)
    return counts


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3", "granite", "cohere"])
def test_rows_that_share_a_prompt_have_the_samples_of_rows_with_a_copy(model_folder, kind, merged):
    sharing, copying = samplers(load(model_folder(kind)))
    found = sharing.generate(rows_of())
    assert {1, 2} <= set(merged), "no step had two shared prompts, or none had one"
    merged.clear()
    expected = copying.generate(rows_of())
    assert not merged
    assert torch.equal(found["output_ids"], expected["output_ids"])
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=LOGPROB_TOLERANCE, rtol=0)


def test_in_bfloat16_the_error_is_not_larger_than_with_copies(model_folder):
    """Against float64 on the tokens that each side sampled: medians over all of them, with a fifth for chance."""
    model = load(model_folder("llama"), dtype=torch.bfloat16)
    exact = load(model_folder("llama"), dtype=torch.bfloat16).double()
    errors = []
    for sampler in samplers(model):
        output = sampler.generate(rows_of(limits=(30,) * len(PROMPT_OF_ROW)))
        of_side = []
        for row, prompt in enumerate(rows_of()["input_lengths"].tolist()):
            ids = output["output_ids"][row, : prompt + 30]
            with torch.no_grad():
                logprobs = exact(ids[None]).logits[0].log_softmax(dim=-1)[prompt - 1 : -1]
            plain = logprobs.gather(1, ids[prompt:, None]).squeeze(1)
            of_side.append((output["logprobs"][row, prompt : prompt + 30].double() - plain).abs())
        errors.append(float(torch.cat(of_side).median()))
    assert errors[0] <= 1.2 * errors[1]


def test_a_prompt_is_stored_once(model_folder):
    sharing, _ = samplers(load(model_folder("llama")))
    data = rows_of(prompt_of_row=(0,) * 6, limits=(30,) * 6)
    with sharing.prepared(rows=6, steps=30), sharing.without_gradients():
        loop = DecodeLoop(sharing, frozenset(), vocab_size=sharing.vocab_size)
        loop.add(sharing.rows.read(data, greedy=False))
        loop.step(0)
        layer = sharing._cache.layers[0]
        assert layer.prompts[0].shape[0] == 1
        assert layer.prompts[0].shape[2] == LENGTHS[0]
        assert sharing._cache.slots.width == 1  # of the row's own columns: the first token that was sampled


def test_layers_with_other_attention_are_noticed_and_their_rows_begin_again(model_folder, monkeypatch):
    """Gemma 2 caps its scores, so it cannot attend to a prompt separately in this way."""
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)  # as before Transformers 5.21
    model = load(model_folder("gemma2"), attn_implementation="sdpa")
    sharing, copying = samplers(model)
    sharing._sharing.is_supported = True  # as if its config had no sliding window
    found, expected = sharing.generate(rows_of()), copying.generate(rows_of())
    assert not sharing._sharing.is_supported
    assert torch.equal(found["output_ids"], expected["output_ids"])
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=LOGPROB_TOLERANCE, rtol=0)


def test_eager_attention_does_not_share(model_folder, merged):
    sampler, _ = samplers(load(model_folder("llama"), attn_implementation="eager"))
    sampler.generate(rows_of())
    assert not merged


def test_a_copy_of_a_slot_contains_its_shared_prompt(model_folder):
    caches = []
    for sampler in samplers(load(model_folder("llama"))):
        with sampler.prepared(rows=6, steps=30), sampler.without_gradients():
            loop = DecodeLoop(sampler, frozenset(), vocab_size=sampler.vocab_size)
            loop.add(sampler.rows.read(rows_of(prompt_of_row=(0, 0, 1, 0), limits=(20,) * 4), greedy=False))
            for _ in range(4):
                loop.step(0)
            slot = next(slot for slot, row in enumerate(sampler._slots) if row.prompt.number == 3)
            caches.append([sampler._cache.copy_of(slot, length) for length in (5, LENGTHS[0], LENGTHS[0] + 3)])
    for shared, copied in zip(*caches, strict=True):
        torch.testing.assert_close(shared, copied, atol=1e-5, rtol=0)


@settings(max_examples=40)
@given(
    by_products=st.booleans(),
    prompt_of_row=st.lists(st.integers(-1, 2), min_size=1, max_size=7),
    prompt_lengths=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    data=st.data(),
)
def test_attention_to_prompt_and_own_tokens_equals_attention_to_both_together(by_products, prompt_of_row, prompt_lengths, data):
    used = sorted({prompt for prompt in prompt_of_row if prompt >= 0})
    if not used:
        return
    rows, heads, group, depth = len(prompt_of_row), 2, 3, 8
    own_lengths = torch.tensor([data.draw(st.integers(1, 5)) for _ in prompt_of_row])
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, heads, group, depth, generator=generator)
    keys, values = torch.randn(2, rows, heads, 5, depth, generator=generator)
    prompts = torch.randn(2, 3, heads, max(prompt_lengths), depth, generator=generator)
    table = PromptTable()
    table.add(prompt_of_row, prompt_lengths)
    # Prompts without rows are dropped, as when their last row ends.
    kept = table.keep(range(rows))
    assert kept == used
    hidden = torch.arange(5) >= own_lengths.unsqueeze(1)
    mask = torch.zeros(rows, 1, 1, 5).masked_fill_(hidden[:, None, None], torch.finfo(torch.float32).min)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_prompts, "prefers_products", lambda device, dtype: by_products)
        found = table.attend(query, tuple(prompts[:, kept]), (keys, values), mask, scale=0.4)
    for row, prompt in enumerate(prompt_of_row):
        before = 0 if prompt < 0 else prompt_lengths[prompt]
        end = int(own_lengths[row])
        all_keys, all_values = (
            torch.cat([held[max(prompt, 0), :, :before], each[row, :, :end]], dim=1)
            for held, each in zip(prompts, (keys, values), strict=True)
        )
        expected = F.scaled_dot_product_attention(query[row], all_keys, all_values, scale=0.4)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_by_products_equals_sdpa(group, scale):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 2, group, 8, generator=generator)
    held_keys, held_values = torch.randn(2, 7, 2, 12, 8, generator=generator)
    keys, values = held_keys[:5, :, :9], held_values[:5, :, :9, :6]  # views of a larger cache
    hidden = torch.arange(9) > torch.tensor([8, 0, 3, 5, 8]).unsqueeze(1)
    mask = torch.zeros(5, 1, 1, 9).masked_fill_(hidden[:, None, None], torch.finfo(torch.float32).min)
    expected = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    torch.testing.assert_close(attend_by_products(query, keys, values, mask, scale=scale), expected, atol=1e-6, rtol=0)
