"""Top-k tokens and log-probabilities of candidates, compared with the full logits of Transformers and autograd."""

import math

import pytest
import torch
from policy_cases import LargestTensor, plain_distributions, plain_model

from rl_backends_hf.policy import HuggingFacePolicy
from rl_backends_hf.scoring.token_scoring import LogitTransform, chunked_scores, chunked_token_logprobs
from rl_core.errors import DataError, NotSupportedError
from rl_core.interfaces.policy import LossFunction
from rl_train.algorithms import DistillationLossFn
from rl_train.algorithms.losses.config import DistillationLossConfig

K = 5
MICROBATCHING = {
    "by_count": {"logprob_batch_size": 3, "train_micro_batch_size": 3},
    "token_budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}},
}


class WeightedCandidates(LossFunction):
    """A weighted sum over candidates and the row's own tokens; all weights differ."""

    required_keys = frozenset({"weights"})
    candidates_key = "wanted"

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        of_candidates = (data["candidate_logprobs"] * data["weights"]).sum(-1)
        loss = ((of_candidates + 0.5 * next_token_logprobs) * mask).sum() / global_valid_toks
        untrained = (data["candidate_logprobs"] * (1 - mask).unsqueeze(-1)).abs().sum()
        return loss, {"untrained": untrained.detach()}


def is_predicted(rows):
    column = torch.arange(rows["input_ids"].shape[1])
    return (column > 0) & (column < rows["input_lengths"].unsqueeze(1))


def with_candidates(rows, vocab_size, *, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (*rows["input_ids"].shape, K)
    rows["wanted"] = torch.randint(0, vocab_size, shape, generator=generator)
    rows["wanted"][..., 1] = rows["wanted"][..., 0]  # one token twice
    rows["wanted"][..., 2] = rows["input_ids"]  # the row's own among them
    rows["weights"] = torch.randn(shape, generator=generator)
    return rows


@pytest.mark.parametrize("microbatching", MICROBATCHING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "granite", "cohere"])
def test_topk_tokens_equal_those_of_plain_logits(parts, model_folder, kind, microbatching):
    rows = parts.make_rows()
    section = {"backend": "hf", "temperature": 0.7}
    config = parts.make_config(model_folder(kind), **MICROBATCHING[microbatching], generation=section)
    found = HuggingFacePolicy(config=config).get_topk_logprobs(rows, K)
    with torch.no_grad():
        whole = plain_distributions(plain_model(model_folder(kind)), rows, temperature=0.7)
    expected = whole.topk(K, dim=-1)
    there = is_predicted(rows).unsqueeze(-1)
    # Float32, other order of summation: the required tolerance is 1e-5 nats.
    torch.testing.assert_close(found["topk_logprobs"], expected.values * there, rtol=0, atol=1e-5)
    # Two tokens of a random model may be level to the last bit; then either may come first.
    at_the_ids = whole.gather(2, found["topk_token_ids"]) * there
    torch.testing.assert_close(at_the_ids, expected.values * there, rtol=0, atol=1e-5)
    assert (found["topk_token_ids"] * ~there == 0).all()
    assert found["topk_token_ids"].dtype == torch.int64
    assert found["topk_logprobs"].dtype == torch.float32
    assert all(len(set(ids)) == K for ids in found["topk_token_ids"][is_predicted(rows)].tolist())


@pytest.mark.parametrize("microbatching", MICROBATCHING)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma2", "granite"])
def test_gradients_through_candidates_equal_autograd_through_all_logits(parts, model_folder, kind, microbatching):
    rows = with_candidates(parts.make_rows(), parts.VOCAB_SIZE)
    section = {"backend": "hf", "temperature": 0.8}
    config = parts.make_config(
        model_folder(kind), **MICROBATCHING[microbatching], generation=section, optimizer=parts.SGD, max_grad_norm=None
    )
    policy = HuggingFacePolicy(config=config)
    before = {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    result = policy.train(rows, WeightedCandidates())

    model = plain_model(model_folder(kind))
    whole = plain_distributions(model, rows, temperature=0.8)
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    own = whole.gather(2, rows["input_ids"].unsqueeze(-1)).squeeze(-1)
    loss = (((whole.gather(2, rows["wanted"]) * rows["weights"]).sum(-1) + 0.5 * own) * mask).sum() / mask.sum()
    loss.backward()
    # Weights of both signs: the sum of terms of order 10 is accurate to 1e-6 of the terms.
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert result["metrics"]["untrained"] == 0.0
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = parts.gradients_from(before, dict(policy.group.worker.iter_weights()))
    assert parts.largest_relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "mixed_kl", "jsd"])
@pytest.mark.parametrize("microbatching", MICROBATCHING)
def test_with_the_whole_vocabulary_a_student_has_the_gradient_of_the_exact_divergence(
    parts, model_folder, divergence, microbatching
):
    rows = parts.make_rows()
    teacher = HuggingFacePolicy(config=parts.make_config(model_folder("llama-tied")))
    topk = teacher.get_topk_logprobs(rows, parts.VOCAB_SIZE)
    rows["teacher_topk_token_ids"], rows["teacher_topk_logprobs"] = topk["topk_token_ids"], topk["topk_logprobs"]
    policy = HuggingFacePolicy(
        config=parts.make_config(model_folder("llama"), **MICROBATCHING[microbatching], optimizer=parts.SGD, max_grad_norm=None)
    )
    before = {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    loss_fn = DistillationLossFn(
        DistillationLossConfig(divergence=divergence, topk=parts.VOCAB_SIZE, beyond_topk="renormalize")
    )
    result = policy.train(rows, loss_fn)

    model = plain_model(model_folder("llama"))
    q = plain_distributions(model, rows)
    with torch.no_grad():
        p = plain_distributions(plain_model(model_folder("llama-tied")), rows)
    forward, reverse = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    m = torch.log(0.5 * p.exp() + 0.5 * q.exp())
    exact = {
        "forward_kl": forward,
        "reverse_kl": reverse,
        "mixed_kl": 0.5 * (forward + reverse),
        "jsd": 0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1),
    }[divergence]
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    loss = (exact * mask).sum() / mask.sum()
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["metrics"]["distillation/kl_forward"] == pytest.approx(((forward * mask).sum() / mask.sum()).item(), rel=1e-5)
    assert result["metrics"]["distillation/kl_reverse"] == pytest.approx(((reverse * mask).sum() / mask.sum()).item(), rel=1e-5)
    found = parts.gradients_from(before, dict(policy.group.worker.iter_weights()))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Terms of both signs over the whole vocabulary cancel; each is rounded to float32 first.
    assert parts.largest_relative_error(found, expected) < 5e-5


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [3, 64])
def test_the_chunked_head_has_the_derivatives_of_its_formula_for_several_targets(chunk, softcap):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((8, 6), (11, 6)))
    bias = torch.randn(11, generator=generator, requires_grad=True)
    targets, upstream = torch.randint(0, 11, (8, 4), generator=generator), torch.randn(8, 4, generator=generator)
    targets[:, 1] = targets[:, 0]
    transform = LogitTransform(scale=0.5, softcap=softcap, temperature=0.8)
    found = chunked_token_logprobs(hidden, weight, bias, targets, transform=transform, chunk=chunk)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = (exact[0] @ exact[1].t() + exact[2]) * 0.5
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    expected = torch.log_softmax(logits, dim=-1).gather(1, targets)
    # Float32 against float64.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(found, (hidden, weight, bias), upstream)
    for one, other in zip(ours, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    ids, logprobs = chunked_scores(
        hidden, lambda rows: rows @ weight.t() + bias, targets, k=4, transform=transform, chunk=chunk
    )
    best = torch.log_softmax(logits, dim=-1).topk(4, dim=-1)
    assert torch.equal(ids, torch.cat([targets, best.indices], dim=1))
    torch.testing.assert_close(logprobs.double(), torch.cat([expected, best.values], dim=1), rtol=1e-5, atol=1e-6)
    assert not logprobs.requires_grad


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_microbatch_without_a_trained_token_goes_through_the_head(shape):
    hidden, weight = torch.randn(0, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    found = chunked_token_logprobs(
        hidden, weight, None, torch.zeros(shape, dtype=torch.int64), transform=LogitTransform(), chunk=4
    )
    assert found.shape == shape
    found.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_full_vocabulary_logits_are_never_stored_for_all_positions(parts, model_folder):
    rows = parts.make_rows()
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("llama"), logprob_batch_size=8))
    policy.get_topk_logprobs(rows, K)
    with LargestTensor() as largest:
        policy.get_topk_logprobs(rows, K)
    positions = int(is_predicted(rows).sum())
    assert largest.elements < positions * parts.VOCAB_SIZE


def test_topk_above_the_vocabulary_size_and_invalid_candidates_are_errors(parts, model_folder):
    rows = with_candidates(parts.make_rows(), parts.VOCAB_SIZE)
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("llama")))
    for k in (0, parts.VOCAB_SIZE + 1):
        with pytest.raises(DataError, match=rf"The {k} most likely tokens.*vocabulary has {parts.VOCAB_SIZE}"):
            policy.get_topk_logprobs(rows, k)
    for token in (parts.VOCAB_SIZE, -1):
        rows["wanted"][0, 0, 0] = token
        with pytest.raises(DataError, match=f"token id {token}, outside the {parts.VOCAB_SIZE} tokens"):
            policy.train(rows, WeightedCandidates())


def test_a_scalar_head_has_no_topk_logprobs(parts, model_folder):
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("llama"), head="scalar"))
    with pytest.raises(NotSupportedError, match="scalar head"):
        policy.get_topk_logprobs(parts.make_rows(), K)


def test_topk_logprobs_are_those_of_the_full_distribution(parts, model_folder):
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("llama")))
    rows = parts.make_rows()
    whole = policy.get_topk_logprobs(rows, parts.VOCAB_SIZE)["topk_logprobs"][is_predicted(rows)]
    few = policy.get_topk_logprobs(rows, K)["topk_logprobs"][is_predicted(rows)]
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(len(whole)), rtol=0, atol=1e-5)
    torch.testing.assert_close(few, whole[:, :K], rtol=0, atol=1e-6)
    assert float(few.exp().sum(-1).max()) < 1.0 - math.exp(-20)
