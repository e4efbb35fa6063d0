"""Output of a vLLM engine: log-probabilities, seeds, stops and limits, compared with plain Transformers."""

import dataclasses
from pathlib import Path

import pytest
import torch
from readable_model import (
    EOS,
    LENGTH,
    VOCABULARY,
    batch_of,
    completions,
    expected_logprobs,
    filtered_logprob,
    first_stop,
    found_logprobs,
    plain_scores,
    random_batch,
    rows_of,
)
from transformers import AutoModelForCausalLM

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError, WeightSyncError, WorkerError

pytestmark = pytest.mark.vllm

ADDITION = Path(__file__).parents[2] / "examples" / "addition" / "model"
NEW = 24


@pytest.fixture
def engine(engines):
    return engines(temperature=0.7, max_new_tokens=NEW)


@pytest.fixture
def addition(engines):
    """The quickstart's model, which ends its answers."""
    return engines(model_name=str(ADDITION), temperature=1.0, max_new_tokens=16, max_model_len=128)


def equal(found, expected):
    # Float32 sums in another order; a wrong temperature or an old weight is whole tenths of a nat.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_an_answer_has_every_column_padded_on_the_right_with_zeros(engine):
    batch = random_batch(max_new_tokens=torch.tensor([3, NEW, 7, 1, 12, 5, 2, 9]))
    output = engine.generate(batch)
    assert {key: (column.dtype, column.shape) for key, column in output.items()} == {
        "output_ids": (torch.int64, output["output_ids"].shape),
        "logprobs": (torch.float32, output["output_ids"].shape),
        "generation_lengths": (torch.int64, (8,)),
        "unpadded_sequence_lengths": (torch.int64, (8,)),
        "truncated": (torch.bool, (8,)),
        "weight_version": (torch.int64, (8,)),
        "token_versions": (torch.int64, output["output_ids"].shape),
    }
    lengths, sampled = output["unpadded_sequence_lengths"], output["generation_lengths"]
    assert output["output_ids"].shape[1] == int(lengths.max())
    assert (lengths - sampled).tolist() == batch["input_lengths"].tolist()
    for row, length in enumerate(batch["input_lengths"].tolist()):
        assert torch.equal(output["output_ids"][row, :length], batch["input_ids"][row, :length])
        assert output["logprobs"][row, :length].abs().max() == 0
        assert output["logprobs"][row, length : int(lengths[row])].max() < 0
        assert output["logprobs"][row, int(lengths[row]) :].abs().sum() == 0
        assert output["output_ids"][row, int(lengths[row]) :].sum() == 0
    assert output["weight_version"].tolist() == [-1] * 8


def test_every_int64_is_a_distinct_seed(engine):
    # -1 means "none" in vLLM, and a CPU generator uses only the lower 32 bits.
    seeds = [-1, 0, 1, -2, 2**32, 2**40, 2**63 - 1, -(2**63), -(2**32)]
    batch = batch_of(*[[5, 6, 7]] * len(seeds), sample_seeds=torch.tensor(seeds))
    rows = completions(engine.generate(batch))
    assert len({tuple(row) for row in rows}) == len(seeds)
    assert rows == completions(engine.generate(batch))
    twins = engine.generate(batch_of([5, 6, 7], [5, 6, 7], sample_seeds=torch.tensor([-1, -1])))
    assert completions(twins) == [rows[0]] * 2


def test_rows_without_seeds_differ_within_a_call_and_between_calls(engine):
    batch = batch_of(*[[5, 6, 7]] * 4)
    rows = completions(engine.generate(batch)) + completions(engine.generate(batch))
    assert len({tuple(row) for row in rows}) == 8


def test_each_row_ends_at_the_first_token_that_completes_one_of_its_stop_strings(engine, tokenizer):
    batch = random_batch(rows=10)
    free = completions(engine.generate(batch))
    texts = [tokenizer.decode(row) for row in free]
    # Three characters that span two tokens; the last two rows have no stop string and one that never occurs.
    strings = [[text[n : n + 3], "never there!"] for n, text in enumerate(texts[:8], 9)] + [None, ["#"]]
    output = engine.generate(batch_of_same(batch, stop_strings=strings))
    expected = [first_stop(tokenizer, row, own or []) or NEW for row, own in zip(free, strings, strict=True)]
    assert max(expected[:8]) < NEW
    assert output["generation_lengths"].tolist() == expected
    assert completions(output) == [row[:count] for row, count in zip(free, expected, strict=True)]
    assert output["truncated"].tolist() == [False] * 8 + [True] * 2


def test_stop_strings_are_not_searched_in_the_prompt(engine, tokenizer):
    batch = random_batch(rows=1)
    [free] = completions(engine.generate(batch))
    inside = tokenizer.decode(batch["input_ids"][0])[:4]
    across = tokenizer.decode(batch["input_ids"][0])[-2:] + tokenizer.decode(free)[:2]
    assert inside not in tokenizer.decode(free)
    assert across not in tokenizer.decode(free)
    output = engine.generate(batch_of_same(batch, stop_strings=[[inside, across]]))
    assert completions(output) == [free]


def test_a_stop_in_the_last_token_that_is_allowed_is_a_stop(engine, tokenizer):
    batch = random_batch(rows=1)
    [free] = completions(engine.generate(batch))
    last = tokenizer.decode(free[:6])[-2:]
    count = first_stop(tokenizer, free, [last])
    at_limit = batch_of_same(batch, stop_strings=[[last]], max_new_tokens=torch.tensor([count]))
    assert engine.generate(at_limit)["truncated"].tolist() == [False]
    before = batch_of_same(batch, stop_strings=[[last]], max_new_tokens=torch.tensor([count - 1]))
    assert engine.generate(before)["truncated"].tolist() == [True]


def batch_of_same(batch, **columns):
    return BatchedDataDict({**batch, **columns})


def test_row_limits_apply_within_the_limits_of_config_and_model(engine):
    prompts = [[5, 6], [7], [8] * (LENGTH - 1), [9] * (LENGTH - 4), [10]]
    output = engine.generate(batch_of(*prompts, max_new_tokens=torch.tensor([1, 5, 9, 9, 10_000])))
    assert output["generation_lengths"].tolist() == [1, 5, 1, 4, NEW]
    assert output["truncated"].tolist() == [True] * 5


def test_rows_of_one_prompt_compute_it_once(engine):
    worker = engine.group.worker
    prompt = list(range(2, 302))
    [read] = worker._reader.read(batch_of(prompt))
    for number in range(4):
        parameters = worker._sampling.parameters(dataclasses.replace(read, seed=number), greedy=False)
        worker._running.add(f"x{number}", prompt, parameters)
    ended = []
    while len(ended) < 4:
        ended += worker._running.finished(1.0)
    # A block of the cache has 128 tokens on a CPU, so 256 of 300 are shared.
    assert sorted(output.num_cached_tokens for output in ended) == [0, 256, 256, 256]


BAD_PROMPTS = {
    "empty": ([], "at least one token"),
    "too long": ([5] * LENGTH, f"max_model_len = {LENGTH}"),
    "beyond the vocabulary": ([5, VOCABULARY], f"token id {VOCABULARY}"),
    "negative": ([-3, 5], "token id -3"),
}


@pytest.mark.parametrize("fault", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_its_row_before_the_engine_sees_any(engine, fault):
    prompt, message = BAD_PROMPTS[fault]
    good = random_batch(rows=2)
    expected = completions(engine.generate(good))
    calls = engine.group.worker._calls
    with pytest.raises(DataError, match=rf"^Row 2 .*{message}"):
        engine.generate(batch_of([4], [6, 7], prompt, [8]))
    assert engine.group.worker._calls == calls
    assert completions(engine.generate(good)) == expected


def test_invalid_limits_stop_strings_and_masks_are_errors(engine):
    for columns, message in (
        ({"max_new_tokens": torch.tensor([1, 0])}, "Row 1 has max_new_tokens = 0"),
        ({"stop_strings": [None, [""]]}, "Row 1: stop strings must not be empty"),
        ({"attention_mask": torch.tensor([[1, 1], [0, 1]])}, "attention_mask of row 1"),
    ):
        with pytest.raises(DataError, match=message):
            engine.generate(batch_of([4, 5], [6, 7], **columns))


def test_an_attention_mask_stands_in_for_lengths(engine):
    batch = random_batch()
    mask = (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()
    masked = BatchedDataDict({"input_ids": batch["input_ids"], "attention_mask": mask, "sample_seeds": batch["sample_seeds"]})
    assert completions(engine.generate(masked)) == completions(engine.generate(batch))


def test_after_a_rejected_refit_the_engine_samples_and_during_a_refit_it_raises(engine):
    batch = random_batch(rows=2)
    expected = completions(engine.generate(batch))
    with pytest.raises(WorkerError, match="nonsense") as refused:
        engine.prepare_refit_info({"nonsense": ((1,), "float32")})
    assert isinstance(refused.value.__cause__, WeightSyncError)
    assert completions(engine.generate(batch)) == expected
    worker = engine.group.worker
    worker._running.pause()
    with pytest.raises(WorkerError, match="has not finished"):
        engine.generate(batch)
    assert engine.invalidate_kv_cache()
    assert completions(engine.generate(batch)) == expected


def test_stop_strings_of_the_config_apply_to_every_row_in_addition_to_its_own(engines, tokenizer):
    batch = random_batch(rows=6)
    free = completions(engines(temperature=1.3, max_new_tokens=NEW).generate(batch))
    everywhere, stop_id = tokenizer.decode(free[0])[4:6], free[1][3]
    own = tokenizer.decode(free[2])[5:8]
    engine = engines(temperature=1.3, max_new_tokens=NEW, stop_strings=[everywhere], stop_token_ids=[stop_id])
    output = engine.generate(batch_of_same(batch, stop_strings=[None, None, [own], None, None, None]))
    for number, (found, row) in enumerate(zip(completions(output), free, strict=True)):
        by_string = first_stop(tokenizer, row, [everywhere, own] if number == 2 else [everywhere]) or NEW + 1
        by_id = row.index(stop_id) + 1 if stop_id in row else NEW + 1
        assert found == row[: min(by_string, by_id)]
        assert bool(output["truncated"][number]) == (min(by_string, by_id) > NEW)
    assert output["truncated"].tolist()[:3] == [False] * 3


def test_under_top_k_and_top_p_they_are_those_of_the_filtered_distribution(engines, plain):
    settings = {"temperature": 1.3, "top_k": 20, "top_p": 0.8}
    engine = engines(max_new_tokens=NEW, **settings)
    batch = random_batch()
    output = engine.generate(batch)
    distinct = 0
    for prompt, tokens, logprobs in rows_of(output):
        with torch.no_grad():
            logits = plain(tokens[None], use_cache=False).logits[0]
        for place, found in enumerate(logprobs.tolist(), prompt):
            expected = filtered_logprob(logits[place - 1], int(tokens[place]), **settings)
            assert found == pytest.approx(expected, abs=1e-5)
            distinct += found < -1e-3
    assert distinct > 50, "filters that leave one token would show nothing"
    greedy = engine.generate(batch, greedy=True)
    equal(found_logprobs(greedy), expected_logprobs(plain, greedy, temperature=1.3))


def test_the_end_of_sequence_token_is_counted_with_its_log_probability(addition):
    model = AutoModelForCausalLM.from_pretrained(ADDITION, dtype=torch.float32)
    batch = batch_of(*[[4, 5, 13, 6, 7, 15], [6, 13, 7, 15]] * 4, sample_seeds=torch.arange(8))
    output = addition.generate(batch)
    ended = [row for row in completions(output) if row[-1] == EOS]
    assert len(ended) > 4
    assert all(EOS not in row[:-1] for row in completions(output))
    equal(found_logprobs(output), expected_logprobs(model, output, temperature=1.0))
    assert output["truncated"].tolist() == [row[-1] != EOS for row in completions(output)]
    # The token at the limit may be the end as well.
    exact = addition.generate(batch_of_same(batch, max_new_tokens=output["generation_lengths"]))
    assert torch.equal(exact["truncated"], output["truncated"])
    prompt, tokens, logprobs = next(row for row in rows_of(output) if int(row[1][-1]) == EOS)
    assert float(logprobs[-1]) == pytest.approx(float(plain_scores(model, tokens, temperature=1.0)[-1]), abs=1e-5)
    assert len(logprobs) == len(tokens) - prompt


def test_a_tiny_model_samples_in_bfloat16(engines, plain):
    # Its matrices are too small for the kernels that ask Linux for the CPU's tile registers, which attention then uses.
    output = engines(temperature=1.0, max_new_tokens=NEW, precision="bfloat16").generate(random_batch())
    expected = expected_logprobs(plain, output, temperature=1.0)
    # Eight bits of mantissa: 0.05 nats in the mean were measured between two bfloat16 implementations.
    assert (found_logprobs(output) - expected).abs().mean() < 0.1


def test_a_model_without_a_tokenizer_samples_and_refuses_stop_strings(engines, plain, tmp_path):
    plain.save_pretrained(tmp_path)
    with pytest.raises(WorkerError, match="requires a tokenizer") as refused:
        engines(model_name=str(tmp_path), max_new_tokens=3, stop_strings=["x"]).generate(batch_of([5]))
    assert isinstance(refused.value.__cause__, ConfigError)
    engine = engines(model_name=str(tmp_path), max_new_tokens=3)
    assert engine.generate(batch_of([5], [6]))["generation_lengths"].tolist() == [3, 3]
    with pytest.raises(DataError, match=r"^Row 1 has stop strings \['x'\], which require a tokenizer"):
        engine.generate(batch_of([5], [6], stop_strings=[None, ["x"]]))


def test_overrides_of_the_config_that_decide_no_tensors_do_not_stop_the_check_of_files(engines):
    overrides = {"a_field": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    engine = engines(max_new_tokens=3, vllm_kwargs={"hf_overrides": overrides})
    assert engine.generate(batch_of([5, 6]))["generation_lengths"].tolist() == [3]
    with pytest.raises(WorkerError, match=r"input_layernorm\.weight: missing"):
        engines(vllm_kwargs={"hf_overrides": {"num_hidden_layers": 9}}).generate(batch_of([5]))
