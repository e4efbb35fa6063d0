import inspect

import pytest
import tokenizers
import torch
import transformers

from rl_backends_hf.config import HFGenerationConfig, HFSamplerConfig
from rl_backends_hf.model import load_model
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.sampling.sampler import Sampler
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, NonFiniteError

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "granite", "cohere")
VOCAB_SIZE = 160
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def models(model_folder):
    loaded = {}

    def get(kind, attention="default"):
        if (kind, attention) not in loaded:
            options = HFModelConfig(attn_implementation=None if attention == "default" else attention)
            loaded[kind, attention] = load_model(model_folder(kind), options=options, dtype=torch.float32)
        return loaded[kind, attention]

    return get


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.fixture(scope="module")
def tokenizer():
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w3"))
    core.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def prompts_of(lengths, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def batch_of(prompts, *, seeds=None, **columns):
    width = max(len(prompt) for prompt in prompts)
    return BatchedDataDict(
        input_ids=torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts]),
        input_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        sample_seeds=torch.tensor(list(range(100, 100 + len(prompts)) if seeds is None else seeds)),
        **columns,
    )


def sampler_of(model, *, tokenizer=None, max_new_tokens=NEW_TOKENS, **settings):
    hf_cfg = {key: settings.pop(key) for key in HFSamplerConfig.model_fields if key in settings}
    return Sampler(model, HFGenerationConfig(max_new_tokens=max_new_tokens, hf_cfg=hf_cfg, **settings), tokenizer=tokenizer)


def completions_of(output):
    spans = zip(output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist(), strict=True)
    return [row[end - new : end] for row, (end, new) in zip(output["output_ids"].tolist(), spans, strict=True)]


def plain_logprobs(model, output, *, temperature=1.0):
    """A separate plain forward pass for each row: log softmax of logits / temperature at the completion's tokens."""
    rows = []
    for ids, end, new in zip(
        output["output_ids"], output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist(), strict=True
    ):
        with torch.no_grad():
            scores = (model(ids[None, :end]).logits[0].float() / temperature).log_softmax(-1)
        rows.append(scores[end - new - 1 : end - 1].gather(1, ids[end - new : end, None]).squeeze(1))
    return rows


def assert_logprobs_equal(output, expected, *, atol=2e-5):
    for row, reference in enumerate(expected):
        end, new = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
        torch.testing.assert_close(output["logprobs"][row, end - new : end], reference, atol=atol, rtol=0)
        assert not output["logprobs"][row, : end - new].any()
        assert not output["logprobs"][row, end:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["default", "eager"])
def test_greedy_rows_equal_transformers_generate_token_for_token(models, kind, attention):
    model = models(kind, attention)
    prompts = prompts_of([1, 9, 4, 9, 30])
    output = sampler_of(model).generate(batch_of(prompts), True)
    for prompt, completion in zip(prompts, completions_of(output), strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert completion == expected[0, len(prompt) :].tolist()
    assert_logprobs_equal(output, plain_logprobs(model, output))


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_samples_equal_a_plain_forward(models, kind):
    model = models(kind)
    prompts = [prompt for prompt in prompts_of([12, 3, 7]) for _ in range(3)]
    output = sampler_of(model, temperature=0.8).generate(batch_of(prompts))
    assert_logprobs_equal(output, plain_logprobs(model, output, temperature=0.8))


def test_truncated_distributions_report_renormalised_log_probabilities(model):
    output = sampler_of(model, temperature=1.2, top_k=20, top_p=0.7).generate(batch_of(prompts_of([5, 8, 2])))
    for ids, end, new, logprobs in zip(
        output["output_ids"],
        output["unpadded_sequence_lengths"].tolist(),
        output["generation_lengths"].tolist(),
        output["logprobs"],
        strict=True,
    ):
        with torch.no_grad():
            scores = model(ids[None, :end]).logits[0].double() / 1.2
        for position in range(end - new, end):
            ranked = scores[position - 1].sort(descending=True)
            top = ranked.values[:20].softmax(-1)
            kept = [k for k in range(20) if float(top[:k].sum()) < 0.7]
            place = ranked.indices[: len(kept)].tolist().index(int(ids[position]))
            expected = (top[place] / top[: len(kept)].sum()).log()
            assert float(logprobs[position]) == pytest.approx(float(expected), abs=1e-4)


def test_a_repetition_penalty_counts_prompt_and_completion_as_transformers_does(model):
    prompts = prompts_of([6, 11])
    output = sampler_of(model, repetition_penalty=1.6).generate(batch_of(prompts), True)
    for prompt, completion in zip(prompts, completions_of(output), strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.6
            )
        assert completion == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_depends_on_its_seed_and_not_on_neighbours_order_batch_size_or_grouping(models, kind):
    model = models(kind)
    prompts = [prompt for prompt in prompts_of([3, 14, 6]) for _ in range(4)]
    batch = batch_of(prompts)
    expected = completions_of(sampler_of(model).generate(batch))
    assert len({tuple(completion) for completion in expected}) > 3
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(3)).tolist()
    permuted = completions_of(sampler_of(model).generate(batch.select_indices(order)))
    assert permuted == [expected[row] for row in order]
    for rows, prefill in ((1, 8192), (5, 16), (12, 1)):
        other = sampler_of(model, max_batch_rows=rows)
        other.prefill_tokens = prefill
        assert completions_of(other.generate(batch)) == expected
    alone = [completions_of(sampler_of(model).generate(batch.slice(row, row + 1)))[0] for row in range(batch.size)]
    assert alone == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_lm_head_never_gets_a_slice_whose_product_would_copy_its_weight_per_row(models, kind):
    contiguous = []
    hook = (
        models(kind)
        .get_output_embeddings()
        .register_forward_pre_hook(lambda module, inputs: contiguous.append(inputs[0].is_contiguous()))
    )
    sampler_of(models(kind), max_new_tokens=2).generate(batch_of(prompts_of([5, 9, 7])))
    hook.remove()
    assert contiguous
    assert all(contiguous)


def test_rows_of_a_prompt_share_one_prefill(model, monkeypatch):
    sampler, prefills = sampler_of(model, max_new_tokens=2), []
    forward = model.forward

    def watched(*args, **kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            prefills.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    watched.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", watched)
    first, second = prompts_of([10, 10])
    sampler.generate(batch_of([first, second, first, second, first]))
    assert prefills == [(2, 10)]


def test_no_row_changes_when_its_neighbours_end_early(model):
    prompts = prompts_of([4, 9, 9, 2, 17, 5])
    expected = completions_of(sampler_of(model).generate(batch_of(prompts)))
    limits = [1, NEW_TOKENS, 3, 9, NEW_TOKENS, 2]
    output = sampler_of(model).generate(batch_of(prompts, max_new_tokens=torch.tensor(limits)))
    assert completions_of(output) == [row[:limit] for row, limit in zip(expected, limits, strict=True)]


def test_the_cache_grows_beyond_its_first_columns(model):
    output = sampler_of(model, max_new_tokens=200).generate(batch_of(prompts_of([3, 20]), seeds=[5, 8]))
    assert output["generation_lengths"].max() > 100
    assert_logprobs_equal(output, plain_logprobs(model, output))


def test_the_same_call_gives_other_samples_the_second_time_unless_seeded(model):
    batch = batch_of(prompts_of([5, 5]))
    sampler = sampler_of(model)
    assert completions_of(sampler.generate(batch)) == completions_of(sampler.generate(batch))
    del batch["sample_seeds"]
    assert completions_of(sampler.generate(batch)) != completions_of(sampler.generate(batch))
    assert completions_of(sampler_of(model).generate(batch)) == completions_of(sampler_of(model).generate(batch))


def test_an_end_token_ends_a_row_and_stays_in_it(model):
    batch = batch_of(prompts_of([5, 6, 7]))
    free = completions_of(sampler_of(model).generate(batch))
    stop = free[0][4]
    output = sampler_of(model, stop_token_ids=(stop,)).generate(batch)
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert completions_of(output) == expected
    assert output["truncated"].tolist() == [row[-1] not in (stop, 2) for row in expected]


def test_an_end_token_at_the_limit_is_not_a_truncation(model):
    batch = batch_of(prompts_of([5]))
    [free] = completions_of(sampler_of(model).generate(batch))
    output = sampler_of(model, stop_token_ids=(free[3],), max_new_tokens=free.index(free[3]) + 1).generate(batch)
    assert output["truncated"].tolist() == [False]


def test_stop_strings_across_tokens_end_only_their_row_and_stay_in_the_output(model, tokenizer):
    prompts = prompts_of([5, 6, 7])
    free = completions_of(sampler_of(model).generate(batch_of(prompts)))
    # The end of one token and the beginning of the next, of the fourth and fifth of row 1.
    text = f"{tokenizer.decode([free[1][3]])[-1:]}{tokenizer.decode([free[1][4]])[:2]}"
    sampler = sampler_of(model, tokenizer=tokenizer)
    output = sampler.generate(batch_of(prompts, stop_strings=[None, [text, "never"], []]))
    first = next(n for n in range(1, len(free[1]) + 1) if text in tokenizer.decode(free[1][:n]))
    assert completions_of(output) == [free[0], free[1][:first], free[2]]
    assert output["truncated"].tolist()[1] is False


def test_stop_strings_of_the_settings_hold_for_every_row(model, tokenizer):
    prompts = prompts_of([5, 6, 7])
    free = completions_of(sampler_of(model).generate(batch_of(prompts)))
    strings = tuple(f"w{row[2]}" for row in free)
    output = sampler_of(model, tokenizer=tokenizer, stop_strings=strings).generate(batch_of(prompts))
    assert output["generation_lengths"].max() <= 3


def test_max_model_len_bounds_prompt_and_completion_and_the_smallest_bound_counts(model):
    prompts = prompts_of([30, 20])
    output = sampler_of(model, max_model_len=32).generate(batch_of(prompts, seeds=[1, 2]))
    assert output["unpadded_sequence_lengths"].max() == 32
    assert output["truncated"].tolist() == [row[-1] != 2 for row in completions_of(output)]
    assert sampler_of(model, max_model_len=10_000).max_model_len == 256


def test_a_row_s_limit_is_never_above_the_settings(model):
    output = sampler_of(model, max_new_tokens=4).generate(batch_of(prompts_of([5]), max_new_tokens=torch.tensor([50])))
    assert output["generation_lengths"].tolist() == [4]


def test_an_attention_mask_replaces_lengths(model):
    prompts = prompts_of([5, 8])
    expected = completions_of(sampler_of(model).generate(batch_of(prompts)))
    batch = batch_of(prompts)
    batch["attention_mask"] = (torch.arange(8) < batch["input_lengths"][:, None]).long()
    del batch["input_lengths"]
    assert completions_of(sampler_of(model).generate(batch)) == expected


def without_room(batch):
    batch["input_ids"] = torch.full((3, 256), 5)
    batch["input_lengths"] = torch.tensor([4, 256, 3])


def without_tokens(batch):
    batch["input_lengths"][1] = 0


def outside_the_vocabulary(batch):
    batch["input_ids"][1, 2] = VOCAB_SIZE


def with_no_limit(batch):
    batch["max_new_tokens"] = torch.tensor([3, 0, 3])


def with_text_to_read(batch):
    batch["stop_strings"] = [None, ["x"], None]


@pytest.mark.parametrize("spoil", [without_room, without_tokens, outside_the_vocabulary, with_no_limit, with_text_to_read])
def test_a_row_that_cannot_be_completed_is_named_before_anything_runs(model, spoil, monkeypatch):
    batch = batch_of(prompts_of([4, 4, 3]))
    spoil(batch)
    sampler = sampler_of(model)
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    with pytest.raises(DataError, match=r"^Row 1 "):
        sampler.generate(batch)


def test_broken_weights_are_an_error_that_names_the_row(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    model.get_output_embeddings().weight.data[7] = float("nan")
    with pytest.raises(NonFiniteError, match="Row 0"):
        sampler_of(model).generate(batch_of(prompts_of([4])))


def test_generation_does_not_change_the_model(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sampler_of(model).generate(batch_of(prompts_of([4, 9])))
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def test_weights_that_change_between_calls_are_seen(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    sampler, batch = sampler_of(model), batch_of(prompts_of([4, 9]))
    before = sampler.generate(batch, weight_version=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = sampler.generate(batch, weight_version=4)
    assert (before["weight_version"].tolist(), after["weight_version"].tolist()) == ([3, 3], [4, 4])
    assert_logprobs_equal(after, plain_logprobs(model, after))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_bfloat16_model_samples_with_log_probabilities_near_its_plain_forward(model_folder, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.bfloat16).eval()
    output = sampler_of(model).generate(batch_of(prompts_of([9, 4, 4])))
    # bfloat16 keeps 8 bits: logits of size 8 are rounded by up to 1/64, and again along the way.
    assert_logprobs_equal(output, plain_logprobs(model, output), atol=0.2)
