"""Rows with a shared prefix have the log-probabilities, values and gradients of the same rows alone."""

import re

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_base.microbatches import padded_input
from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.cpu_attention import cpu_sdpa, share_prefixes, use_cpu_sdpa
from rl_backends_hf.scoring.model_inputs import shared_input
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.training.prefix_support import why_not_shared
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses import DPOLossFn

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "gpt2")
CPU = torch.device("cpu")


@st.composite
def batches(draw):
    """Rows of up to three prompts in any order: one-row groups, unequal lengths, truncated prompts, several trained turns."""
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows, prompt_ids = [], []
    for prompt_id in range(draw(st.integers(1, 3))):
        prompt = torch.randint(3, 160, (draw(st.integers(1, 9)),), generator=noise)
        for more in draw(st.lists(st.integers(-2, 9), min_size=1, max_size=4)):
            own = torch.randint(3, 160, (max(more, 0),), generator=noise)
            rows.append(torch.cat([prompt[: max(len(prompt) + min(more, 0), 1)], own]))
            prompt_ids.append(prompt_id)
    order = draw(st.permutations(range(len(rows))))
    ids = torch.nn.utils.rnn.pad_sequence([rows[row] for row in order], batch_first=True)
    lengths = torch.tensor([len(rows[row]) for row in order])
    trained = (torch.rand(ids.shape, generator=noise) < 0.6) & (torch.arange(ids.shape[1]) < lengths.unsqueeze(1))
    weights = torch.randn(ids.shape, generator=noise)
    return ids, lengths, torch.tensor([prompt_ids[row] for row in order]), trained, weights


@pytest.fixture(scope="module")
def scoring_of(model_folder):
    """A tiny model with its attention registered, by kind and dtype."""
    made = {}

    def load(kind, dtype=torch.float32):
        if (kind, dtype) not in made:
            model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=dtype).eval()
            assert use_cpu_sdpa(model)
            made[kind, dtype] = TokenScoring(model, chunk_tokens=7)
        return made[kind, dtype]

    return load


def scores_and_gradients(scoring, batch, *, shared):
    ids, lengths, prompt_ids, trained, weights = batch
    arguments = {"device": CPU, "shift": 1}
    form = (lambda **more: shared_input(ids, lengths, prompt_ids, **arguments, **more)) if shared else None
    form = form or (lambda **more: padded_input(ids, lengths, **arguments, **more))
    with torch.no_grad():
        scores = scoring.score(form())
    scoring.zero_grad()
    (scoring.score(form(mask=trained)) * weights).sum().backward()
    return scores, {name: each.grad.clone() for name, each in scoring.named_parameters() if each.grad is not None}


def relative(found, expected):
    return float((found - expected).norm() / expected.norm().clamp(min=1e-3))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(batch=batches())
def test_logprobs_and_gradients_are_those_of_the_rows_alone(scoring_of, kind, batch):
    scoring = scoring_of(kind)
    scores, gradients = scores_and_gradients(scoring, batch, shared=True)
    alone, expected = scores_and_gradients(scoring, batch, shared=False)
    assert relative(scores, alone) < 1e-5
    assert gradients.keys() == expected.keys()
    whole = torch.cat([each.flatten() for each in expected.values()])
    assert relative(torch.cat([each.flatten() for each in gradients.values()]), whole) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_of_equal_length_are_those_of_the_rows_alone(scoring_of, kind):
    ids, _, prompt_ids, _, weights = fixed_batch(0)
    lengths = torch.full((len(ids),), ids.shape[1])
    [segment] = share_prefixes(ids, lengths, prompt_ids).segments
    assert not segment.is_padded
    batch = ids, lengths, prompt_ids, torch.arange(ids.shape[1]).expand_as(ids) >= 12, weights
    scores, gradients = scores_and_gradients(scoring_of(kind), batch, shared=True)
    alone, expected = scores_and_gradients(scoring_of(kind), batch, shared=False)
    assert relative(scores, alone) < 1e-5
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < 1e-4, name


@pytest.mark.full("thousands of examples")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400)
@given(batch=batches())
def test_logprobs_and_gradients_are_those_of_the_rows_alone_in_many_examples(scoring_of, kind, batch):
    scoring = scoring_of(kind)
    scores, gradients = scores_and_gradients(scoring, batch, shared=True)
    alone, expected = scores_and_gradients(scoring, batch, shared=False)
    assert relative(scores, alone) < 1e-5
    whole = torch.cat([each.flatten() for each in expected.values()])
    assert relative(torch.cat([each.flatten() for each in gradients.values()]), whole) < 1e-5


def fixed_batch(seed, *, prompt=12, rows=6, more=10):
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 160, (rows, prompt + more), generator=noise)
    ids[:, :prompt] = ids[0, :prompt]
    lengths = prompt + torch.randint(1, more + 1, (rows,), generator=noise)
    trained = (torch.arange(prompt + more) >= prompt) & (torch.arange(prompt + more) < lengths.unsqueeze(1))
    return ids, lengths, torch.zeros(rows, dtype=torch.int64), trained, torch.randn(ids.shape, generator=noise)


@pytest.mark.full("enough batches for a mean of rounding errors")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_the_error_against_float64_is_not_larger(scoring_of, kind):
    errors = {True: [], False: []}
    for seed in range(100):
        batch = fixed_batch(seed)
        exact, gradients = scores_and_gradients(scoring_of(kind, torch.float64), batch, shared=False)
        whole = torch.cat([each.flatten() for each in gradients.values()])
        for shared, found in errors.items():
            scores, computed = scores_and_gradients(scoring_of(kind, torch.bfloat16), batch, shared=shared)
            error = torch.cat([each.flatten() for each in computed.values()]).double() - whole
            found.append((float((scores - exact).square().mean()), float(error.square().sum() / whole.square().sum())))
    for shared, alone in zip(zip(*errors[True], strict=True), zip(*errors[False], strict=True), strict=True):
        # Mostly rounding of the linear layers, which rows share with their prefix: a mean over fewer independent errors.
        assert sum(shared) <= 1.15 * sum(alone)


def dense(q, k, v, sees):
    """Attention with a mask [N, N], by its definition."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return torch.softmax((q @ k.transpose(-1, -2) * 0.3).masked_fill(~sees, float("-inf")), dim=-1) @ v


def mask_of(layout):
    """[N, N], whether a token is in a row of another token, at or before it."""
    tokens = layout.input_ids.shape[1]
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    for row in layout.token_index:
        own = row[row >= 0]
        sees[own.unsqueeze(1), own] |= torch.ones(len(own), len(own), dtype=torch.bool).tril()
    return sees


def random_heads(tokens, key_heads, dtype):
    noise = torch.Generator().manual_seed(1)
    shapes = [(1, heads, tokens, 8) for heads in (4, key_heads, key_heads)]
    return [torch.randn(shape, generator=noise).to(dtype).requires_grad_() for shape in shapes]


def outputs_and_gradients(attend, tensors):
    output = attend(*tensors)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return output, *torch.autograd.grad((output * weights).sum(), tensors)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@settings(max_examples=10)
@given(batch=batches())
def test_attention_is_that_of_a_dense_mask(key_heads, batch):
    layout = share_prefixes(*batch[:3])
    tensors = random_heads(layout.input_ids.shape[1], key_heads, torch.float64)
    found = outputs_and_gradients(lambda *qkv: attend(layout, *qkv), tensors)
    expected = outputs_and_gradients(lambda *qkv: dense(*qkv, mask_of(layout)), tensors)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)


def attend(layout, *qkv):
    return cpu_sdpa(torch.nn.Module(), *qkv, None, shared_prefix=layout, scaling=0.3)[0].transpose(1, 2)


def test_attention_in_bfloat16_has_a_smaller_error_than_sdpa():
    layout = share_prefixes(*fixed_batch(0, prompt=30, rows=4, more=30)[:3])
    tensors = random_heads(layout.input_ids.shape[1], 2, torch.bfloat16)
    sees = mask_of(layout)
    exact = outputs_and_gradients(lambda *qkv: dense(*qkv, sees), [each.detach().double().requires_grad_() for each in tensors])

    def sdpa(q, k, v):
        mask = torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, float("-inf"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)

    shared = outputs_and_gradients(lambda *qkv: attend(layout, *qkv), tensors)
    plain = outputs_and_gradients(sdpa, tensors)
    for one, other, true in zip(shared, plain, exact, strict=True):
        assert (one - true).norm() <= (other - true).norm()


@pytest.mark.parametrize("length", [20, 128])
def test_short_rows_in_bfloat16_have_the_outputs_of_sdpa_and_gradients_with_a_smaller_error(length):
    tensors = random_heads(length, 2, torch.bfloat16)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    exact = outputs_and_gradients(lambda *qkv: dense(*qkv, sees), [each.detach().double().requires_grad_() for each in tensors])

    def sdpa(*qkv):
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3, enable_gqa=True)

    module = torch.nn.Module()
    module.num_key_value_groups = 2
    ours = outputs_and_gradients(lambda *qkv: cpu_sdpa(module, *qkv, None, scaling=0.3)[0].transpose(1, 2), tensors)
    plain = outputs_and_gradients(sdpa, tensors)
    assert torch.equal(ours[0], plain[0])
    for one, other, true in zip(ours[1:], plain[1:], exact[1:], strict=True):
        assert (one - true).norm() <= (other - true).norm()


FORMS = {
    "by_count": {"train_micro_batch_size": 4, "logprob_batch_size": 4},
    "token_budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 60, "logprob_mb_tokens": 60}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 60, "logprob_mb_tokens": 60}},
    "checkpointed": {"activation_checkpointing": True},
    "lora": {"hf_cfg": {"lora": {"rank": 4}}},
}


def make_rows(parts, *, pairs=False, seed=3):
    """Four prompts with four rows each in any order; or eight pairs, of which two have the same prompt."""
    noise = torch.Generator().manual_seed(seed)
    prompt_ids = torch.arange(4).repeat_interleave(4)
    order = torch.arange(16) if pairs else torch.randperm(16, generator=noise)
    prompts = torch.randint(3, 160, (4, 10), generator=noise)[prompt_ids]
    ids = torch.cat([prompts, torch.randint(3, 160, (16, 8), generator=noise)], dim=1)[order]
    lengths = torch.randint(11, 19, (16,), generator=noise)
    column = torch.arange(18)
    is_token = column < lengths.unsqueeze(1)
    return BatchedDataDict(
        input_ids=torch.where(is_token, ids, 0),
        input_lengths=lengths,
        token_mask=(is_token & (column >= 10)).float(),
        sample_mask=torch.ones(16),
        weights=torch.rand(16, generator=noise) + 0.5,
        prompt_id=prompt_ids[order],
    )


def start(folder, parts, shared, **fields):
    fields = {"optimizer": parts.SGD, "max_grad_norm": None} | fields
    return HuggingFacePolicy(folder, shared_prefix="auto" if shared else "off", **fields)


def without_dropout(loss):
    loss.allows_dropout = False
    return loss


def spy(policy):
    """Lengths of the sequences that the model gets."""
    seen = []
    scoring = policy.group._worker.model
    scoring.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_scores_and_trains_alike_and_computes_fewer_tokens(parts, model_folder, form):
    rows, found, tokens = make_rows(parts), {}, {}
    for shared in (True, False):
        slow = {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-2}}
        policy = start(model_folder("llama"), parts, shared, optimizer=slow, **FORMS[form])
        policy.prepare_for_training()
        tokens[shared] = spy(policy)
        before = policy.get_logprobs(rows)["logprobs"]
        topk = policy.get_topk_logprobs(rows, k=3)["topk_logprobs"]
        result = policy.train(rows, without_dropout(parts.NLL()), gbs=8)
        after = policy.get_logprobs(rows)["logprobs"]
        reference = policy.get_reference_logprobs(rows)["reference_logprobs"]
        found[shared] = (before, topk, after, reference, after - before), result
    for one, other in zip(found[True][0][:-1], found[False][0][:-1], strict=True):
        assert relative(one, other) < 1e-5
    # What two steps changed, after rounding of the numbers that it is the difference of.
    assert relative(found[True][0][-1], found[False][0][-1]) < 1e-3
    for name in ("loss", "grad_norm"):
        assert found[True][1][name] == pytest.approx(found[False][1][name], rel=1e-5)
    assert sum(tokens[True]) < 0.8 * sum(tokens[False])


def test_a_value_model_scores_and_trains_alike(parts, model_folder):
    rows, found = make_rows(parts), {}
    for shared in (True, False):
        policy = start(model_folder("llama"), parts, shared, **parts.VALUE_FIELDS)
        policy.train(rows, parts.SquaredValues())
        assert policy.facts["shared_prefix"] is shared
        found[shared] = policy.get_values(rows)["values"]
    assert relative(found[True], found[False]) < 1e-5


@pytest.mark.parametrize("form", ["by_count", "packed"])
def test_preference_pairs_train_alike(parts, model_folder, form):
    rows, found = make_rows(parts, pairs=True), {}
    rows["reference_policy_logprobs"] = -torch.rand(rows["token_mask"].shape) * rows["token_mask"]
    for shared in (True, False):
        policy = start(model_folder("llama"), parts, shared, **FORMS[form])
        found[shared] = policy.train(rows, DPOLossFn())
    assert found[True]["grad_norm"] == pytest.approx(found[False]["grad_norm"], rel=1e-5)
    assert found[True]["metrics"] == pytest.approx(found[False]["metrics"], rel=1e-4, abs=1e-6)


def test_ten_steps_agree(parts, model_folder):
    found = {}
    for shared in (True, False):
        adam = {"kwargs": {"lr": 1e-3, "eps": 1e-3}}
        policy = start(model_folder("llama"), parts, shared, optimizer=adam)
        losses = [policy.train(make_rows(parts, seed=step), without_dropout(parts.NLL()))["loss"] for step in range(10)]
        found[shared] = losses, policy.get_logprobs(make_rows(parts))["logprobs"]
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-4)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-4, atol=1e-4)


def test_a_batch_that_would_not_profit_and_one_without_prompt_ids_are_computed_as_rows(
    parts, model_folder, caplog, own_messages
):
    caplog.set_level("INFO", logger="rl_backends_base")
    policy = start(model_folder("llama"), parts, True)
    rows = make_rows(parts)
    rows["prompt_id"] = torch.arange(16)
    seen = spy(policy)
    policy.get_logprobs(rows)
    policy.get_logprobs(BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths")}))
    assert seen == [16 * int(rows["input_lengths"].max())] * 2
    assert "which is not worthwhile" in caplog.text
    policy.get_logprobs(make_rows(parts))
    policy.get_logprobs(make_rows(parts))
    assert len(own_messages()) == 2
    assert "full causal attention, checked on a test input" in caplog.text


UNSUPPORTED = {
    "gemma2": "layers of type sliding_attention|attention implementation",  # the latter since Transformers 5.21
    "bloom": "attention implementation",
    "mamba": "layer types|layers of type|attention implementation",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_models_without_full_causal_attention_are_computed_as_rows_and_the_reason_is_given(parts, model_folder, kind):
    small = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    if kind == "gemma2":
        model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind))
    elif kind == "bloom":
        model = transformers.AutoModelForCausalLM.from_config(transformers.BloomConfig(**small, n_head=4))
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**small, state_size=4))
    use_cpu_sdpa(model.eval())
    reason = why_not_shared(
        TokenScoring(model, chunk_tokens=7), parts.make_config("any"), device=CPU, computed_in=torch.float32
    )
    assert re.search(UNSUPPORTED[kind], reason), reason


def test_a_model_that_mixes_tokens_outside_of_attention_is_found_by_the_test_input(parts, model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    use_cpu_sdpa(model)
    layer = model.base_model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden + hidden.roll(1, dims=1))
    reason = why_not_shared(
        TokenScoring(model, chunk_tokens=7), parts.make_config("any"), device=CPU, computed_in=torch.float32
    )
    assert "for a test input change by" in reason


def test_settings_that_rule_it_out_are_given_as_the_reason(parts, model_folder):
    folder = model_folder("llama")
    for fields, reason in (
        ({"hf": {"attn_implementation": "eager"}}, "attention implementation is 'eager'"),
        ({"hf": {"lora": {"dropout": 0.1}}}, "lora.dropout"),
        ({"shared_prefix": "off"}, "`shared_prefix` is off"),
    ):
        policy = HuggingFacePolicy(config=parts.make_config(folder, **fields))
        assert policy.facts["shared_prefix"] is False
        assert reason in policy.facts["shared_prefix_reason"]


def test_checkpoints_do_not_name_the_attention_function(parts, model_folder, tmp_path):
    policy = start(model_folder("llama"), parts, True)
    policy.save_checkpoint(tmp_path / "w")
    assert "rlcore" not in (tmp_path / "w" / "config.json").read_text()
