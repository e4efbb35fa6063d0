"""Log-probabilities and gradients among the tokens that top-k, top-p and min-p kept, as the engine sampled them."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.scoring.token_scoring import LogitTransform, chunked_token_logprobs
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, SampledSets, kept_tokens
from rl_core.errors import BrokenPromiseError
from rl_core.testing.outputs.models import checked_generation, right_row
from rl_train.logprob_agreement import compare_log_probabilities, rows_to_score, sampled_tokens

FILTERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.05}
LAYOUTS = {
    "rows": {"logprob_batch_size": 3, "train_micro_batch_size": 3, "shared_prefix": "off"},
    "shared prefixes": {"logprob_batch_size": 6, "train_micro_batch_size": 6},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}},
    "token budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 80}},
}


def random_sets(targets, vocabulary, generator):
    """Random sets that contain the targets, as a mask [N, V] and as words; every fourth token has none."""
    kept = torch.rand(len(targets), vocabulary, generator=generator) < 0.2
    kept[torch.arange(len(targets)), targets] = True
    words = torch.where(torch.arange(len(targets)).unsqueeze(1) % 4 == 3, False, kept)
    sets = SampledSets(counts=words.sum(1, dtype=torch.int32), words=words.nonzero()[:, 1].to(torch.int32))
    return kept | ~words.any(1, keepdim=True), sets


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    softcap=st.sampled_from([None, 3.0]),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 999),
)
def test_logprobs_and_gradients_equal_those_of_masked_logits_in_float64(rows, chunk, softcap, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, 8, generator=generator), torch.randn(50, 8, generator=generator)
    bias, upstream = torch.randn(50, generator=generator), torch.randn(rows, generator=generator)
    targets = torch.randint(50, (rows,), generator=generator)
    kept, sets = random_sets(targets, 50, generator)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    transform = LogitTransform(scale=0.7, softcap=softcap, temperature=temperature)
    found = chunked_token_logprobs(*leaves, targets, transform=transform, chunk=chunk, sets=sets)
    (found * upstream).sum().backward()

    exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*exact) * 0.7
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    expected = (logits / temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)[torch.arange(rows), targets]
    (expected * upstream.double()).sum().backward()
    # float32 against float64: logits are below 30, so 1e-5 is a few units in the last place.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    for one, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def sampled(model_folder):
    """Rows that an engine sampled with filters: two samples of each of six prompts."""
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=12, temperature=0.8, **FILTERS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 160, (6, 9), generator=generator).repeat_interleave(2, dim=0)
    prompts = {"input_ids": ids, "input_lengths": torch.full((12,), 9), "prompt_id": torch.arange(6).repeat_interleave(2)}
    data = BatchedDataDict({**prompts, "sampling": [{SETS: True}] * 12, "sample_seeds": torch.arange(12)})
    output = checked_generation(engine.generate(data), data=data, generation=engine)
    yield engine, data, output
    engine.shutdown()


def scoring_policy(parts, folder, **fields):
    section = {"backend": "hf", "temperature": 0.8, **FILTERS}
    return HuggingFacePolicy(config=parts.make_config(folder, max_total_sequence_length=32, generation=section, **fields))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_agrees_with_the_engine_in_every_layout_and_trains_what_it_scores(parts, model_folder, sampled, layout):
    _, data, output = sampled
    policy = scoring_policy(parts, model_folder("llama"), optimizer=parts.SGD, max_grad_norm=None, **LAYOUTS[layout])
    rows, mask = BatchedDataDict({**rows_to_score(output), "prompt_id": data["prompt_id"]}), sampled_tokens(output)
    scores = policy.get_logprobs(rows)["logprobs"]
    # Both sides compute in float32, in another order.
    assert float((scores - output["logprobs"])[mask].abs().mean()) < 1e-6
    torch.testing.assert_close(scores[mask], output["logprobs"][mask], rtol=0, atol=1e-5)
    whole = policy.get_logprobs(BatchedDataDict({key: rows[key] for key in rows if key != SETS}))["logprobs"]
    assert float((whole - output["logprobs"])[mask].abs().mean()) > 0.05
    torch.testing.assert_close(whole[~mask], scores[~mask], rtol=0, atol=1e-5)
    reference = policy.get_reference_policy_logprobs(rows)["reference_logprobs"]
    torch.testing.assert_close(reference, scores, rtol=0, atol=1e-6)

    rows |= {"token_mask": mask.float(), "sample_mask": torch.ones(12), "weights": torch.linspace(-1, 1, 12)}
    before = {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    policy.train(rows, parts.NLL())
    found = parts.gradients_from(before, dict(policy.group.worker.iter_weights()))
    assert parts.largest_relative_error(found, masked_gradients(model_folder("llama"), rows)) < 1e-5


def masked_gradients(folder, rows):
    """Gradients of the loss of `NLL` over all rows, by Transformers and autograd alone."""
    import transformers

    model, total = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
    for row, (ids, length) in enumerate(zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)):
        logits = model(ids[None, :length], use_cache=False).logits[0, :-1].float() / 0.8
        kept = torch.zeros(length, logits.shape[1], dtype=torch.bool)
        kept[kept_tokens(rows[SETS][row])] = True
        outside = ~kept[1:] & kept[1:].any(dim=1, keepdim=True)
        scores = logits.masked_fill(outside, -torch.inf).log_softmax(-1).gather(1, ids[1:length, None])[:, 0]
        total = total - (scores * rows["token_mask"][row, 1:length]).sum() * rows["weights"][row]
    (total / rows["token_mask"].sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_rows_that_share_a_token_but_not_its_set_are_scored_apart(parts, model_folder):
    policy = scoring_policy(parts, model_folder("llama"), logprob_batch_size=4)
    ids = torch.randint(3, 160, (1, 20), generator=torch.Generator().manual_seed(2)).repeat(2, 1)
    ids[1, -1] = 5
    none = torch.zeros(20, dtype=torch.int32)

    def only(*kept):
        return SampledSets(
            counts=none.index_fill(0, torch.tensor([10]), len(kept)), words=torch.tensor(kept, dtype=torch.int32)
        )

    token = int(ids[0, 10])
    rows = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([20, 20]), "prompt_id": torch.zeros(2).long()})
    rows[SETS] = [only(token), only(token, 5 if token != 5 else 6)]
    scores = policy.get_logprobs(rows)["logprobs"]
    assert policy._sharing.enabled
    assert float(scores[0, 10]) == 0.0
    assert float(scores[1, 10]) < -1e-4
    torch.testing.assert_close(scores[0, :10], scores[1, :10], rtol=0, atol=1e-6)


def test_streamed_rows_have_the_sets_of_complete_batches(sampled):
    engine, data, output = sampled

    async def streamed(row):
        async for _, each in engine.generate_async(data.slice(row, row + 1)):
            return each

    for row in (0, 5):
        single = asyncio.run(streamed(row))
        one, other = right_row(single, data.slice(row, row + 1), engine).sampled_sets, output[SETS][row]
        assert torch.equal(one["counts"], other["counts"][9:])
        assert torch.equal(one["words"], other["words"])


def test_rows_that_do_not_ask_for_sets_get_none(sampled):
    engine, data, _ = sampled
    plain = BatchedDataDict({key: data[key] for key in data if key != "sampling"})
    assert SETS not in engine.generate(plain)
    half = engine.generate(BatchedDataDict({**plain, "sampling": [{SETS: True}] * 6 + [None] * 6}))
    assert [each is None for each in half[SETS]] == [False] * 6 + [True] * 6


def test_a_comparison_of_engine_and_policy_asks_for_the_sets(parts, model_folder, sampled):
    engine, data, _ = sampled
    policy = scoring_policy(parts, model_folder("llama"))
    plain = BatchedDataDict({key: data[key] for key in data if key != "sampling"})
    assert compare_log_probabilities(policy, engine, plain).mean_abs_difference < 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda sets: None, "for each token of prompt and completion"),
        (lambda sets: {**sets, "counts": sets["counts"][1:]}, "for each token of prompt and completion"),
        (lambda sets: {**sets, "words": sets["words"][1:]}, "for each token of prompt and completion"),
        (lambda sets: {**sets, "words": sets["words"] + 1}, "of row 2 that does not fit its token"),
        (lambda sets: {**sets, "counts": sets["counts"].roll(-1)}, "of row 2 that does not fit its token"),
    ],
)
def test_sets_that_do_not_fit_their_row_are_a_broken_promise(sampled, change, says):
    engine, data, output = sampled
    sets = [change(each) if row == 2 else each for row, each in enumerate(output[SETS])]
    with pytest.raises(BrokenPromiseError, match=f"HuggingFaceGeneration.*`sampled_sets` {says}"):
        checked_generation(BatchedDataDict({**output, SETS: sets}), data=data, generation=engine)
    without = BatchedDataDict({key: output[key] for key in output if key != SETS})
    with pytest.raises(BrokenPromiseError, match="returned no `sampled_sets` for each token"):
        checked_generation(without, data=data, generation=engine)
