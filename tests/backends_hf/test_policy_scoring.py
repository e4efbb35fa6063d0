import pytest
import torch
import transformers
from policy_cases import LargestTensor, plain_model

from rl_backends_hf.policy import HuggingFacePolicy
from rl_backends_hf.scoring.model_inputs import packed_input
from rl_backends_hf.scoring.probe import probe_scoring
from rl_backends_hf.scoring.token_scoring import LogitTransform, TokenScoring, chunked_token_logprobs
from rl_core.errors import NotSupportedError

MICROBATCHING = {
    "by_count": {"logprob_batch_size": 3, "train_micro_batch_size": 3},
    "token_budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}},
    "packed_padded": {
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": 48,
            "logprob_mb_tokens": 48,
            "sequence_length_pad_multiple": 4,
        }
    },
}


@pytest.mark.parametrize("microbatching", MICROBATCHING)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_logprobs_equal_a_plain_forward_pass(parts, model_folder, kind, microbatching):
    rows = parts.make_rows()
    policy = HuggingFacePolicy(
        config=parts.make_config(
            model_folder(kind), **MICROBATCHING[microbatching], generation={"backend": "hf", "temperature": 0.7}
        )
    )
    with torch.no_grad():
        expected = parts.plain_logprobs(plain_model(model_folder(kind)), rows, temperature=0.7)
    found = policy.get_logprobs(rows)["logprobs"]
    # Float32, other order of summation: the required tolerance is 1e-5 nats.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(policy.get_reference_logprobs(rows)["reference_logprobs"], found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_models_with_capped_or_scaled_logits_are_scored_as_they_sample(parts, model_folder, kind):
    rows = parts.make_rows()
    policy = HuggingFacePolicy(config=parts.make_config(model_folder(kind)))
    with torch.no_grad():
        expected = parts.plain_logprobs(plain_model(model_folder(kind)), rows)
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("microbatching", MICROBATCHING)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_gradients_equal_one_plain_backward_pass(parts, model_folder, kind, microbatching):
    rows = parts.make_rows()
    policy = HuggingFacePolicy(
        config=parts.make_config(model_folder(kind), **MICROBATCHING[microbatching], optimizer=parts.SGD, max_grad_norm=None)
    )
    worker = policy.group.worker
    before = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    result = policy.train(rows, parts.NLL())
    expected = parts.plain_gradients(model_folder(kind), rows)
    assert parts.largest_relative_error(parts.gradients_from(before, dict(worker.iter_weights())), expected) < 1e-5
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert result["metrics"]["nll"] == pytest.approx(result["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_gradients_go_through_cap_scale_and_temperature(parts, model_folder, kind):
    rows = parts.make_rows()
    section = {"backend": "hf", "temperature": 0.5}
    config = parts.make_config(
        model_folder(kind), optimizer=parts.SGD, max_grad_norm=None, generation=section, activation_checkpointing=True
    )
    policy = HuggingFacePolicy(config=config)
    before = {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    policy.train(rows, parts.NLL(), mbs=3)
    expected = parts.plain_gradients(model_folder(kind), rows, temperature=0.5)
    found = parts.gradients_from(before, dict(policy.group.worker.iter_weights()))
    assert parts.largest_relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("rows", "chunk"), [(8, 3), (8, 64), (70, 64), (70, 70)])
def test_the_chunked_head_has_the_derivatives_of_its_formula(rows, chunk, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((rows, 6), (11, 6)))
    bias = torch.randn(11, generator=generator, requires_grad=True)
    targets, upstream = torch.randint(0, 11, (rows,), generator=generator), torch.randn(rows, generator=generator)
    transform = LogitTransform(scale=0.5, softcap=softcap, temperature=0.8)
    found = chunked_token_logprobs(hidden, weight, bias, targets, transform=transform, chunk=chunk)
    logits = (hidden @ weight.t() + bias) * 0.5
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    expected = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    inputs = (hidden, weight, bias)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_second_backward_pass_through_logits_that_became_their_gradient_is_refused():
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    targets = torch.zeros(4, dtype=torch.int64)
    total = chunked_token_logprobs(hidden, weight, None, targets, transform=LogitTransform(), chunk=4).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_the_full_logits_tensor_is_never_allocated(parts, model_folder):
    rows = parts.make_rows(num_rows=16, width=64)
    config = parts.make_config(model_folder("llama"), train_micro_batch_size=16, logprob_batch_size=16, hf={"reference": False})
    worker = HuggingFacePolicy(config=config).group.worker
    all_logits = 16 * int(rows["input_lengths"].max()) * parts.VOCAB_SIZE
    with LargestTensor() as scoring:
        worker.get_logprobs(rows)
    with LargestTensor() as training:
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    # The largest tensor is the feed-forward activations, 48 per token; all logits would be 160 per token.
    assert max(scoring.elements, training.elements) < all_logits / 2


def test_packed_rows_do_not_see_each_other(parts, model_folder):
    scoring = TokenScoring(plain_model(model_folder("qwen3")), chunk_tokens=7)
    rows = parts.make_rows(num_rows=3)
    other = rows["input_ids"].clone()
    other[0] = (other[0] + 17) % parts.VOCAB_SIZE
    cpu = torch.device("cpu")
    with torch.no_grad():
        first, second = (
            scoring.score(packed_input(ids, rows["input_lengths"], device=cpu, shift=1)) for ids in (rows["input_ids"], other)
        )
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1:], second[1:], rtol=0, atol=0)


def test_a_model_whose_logits_are_not_its_head_is_refused(model_folder):
    scoring = TokenScoring(plain_model(model_folder("granite")), chunk_tokens=7)
    scoring.transform = LogitTransform()
    with pytest.raises(NotSupportedError, match="not its head applied to its backbone"):
        probe_scoring(
            scoring, device=torch.device("cpu"), packing=False, variable_length_kernel=None, computed_in=torch.float32
        )


def test_a_model_without_block_diagonal_packing_is_refused_for_packing_alone():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4, initializer_range=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        scoring = TokenScoring(transformers.MambaForCausalLM(config).eval(), chunk_tokens=7)
    options = {"device": torch.device("cpu"), "variable_length_kernel": None, "computed_in": torch.float32}
    probe_scoring(scoring, packing=False, **options)
    with pytest.raises(NotSupportedError, match="Packed rows attend to each other"):
        probe_scoring(scoring, packing=True, **options)
