"""Top-k tokens and gradients through candidates under every parallel layout, compared with the full logits of Transformers."""

import megatron_cases as cases
import megatron_layouts as layouts
import megatron_ranks as ranks
import pytest
import torch

from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import DataError, NotSupportedError

pytestmark = pytest.mark.megatron
over_ranks = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def plain(models):
    """By kind: the rows, all distributions, and the loss and gradients of autograd through them."""
    made = {}

    def of(kind):
        if kind not in made:
            model, rows = cases.plain_model(models / kind), cases.make_candidates()
            whole = cases.plain_distributions(model, rows, temperature=0.8)
            mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
            own = whole.gather(2, rows["input_ids"].unsqueeze(-1)).squeeze(-1)
            loss = cases.weighted_candidates(whole.gather(2, rows["candidates"]), own, rows, mask) / mask.sum()
            loss.backward()
            made[kind] = rows, whole.detach(), loss.item(), cases.checkpoint_gradients(model)
        return made[kind]

    return of


def assert_topk(ids, logprobs, rows, whole):
    column = torch.arange(ids.shape[1])
    there = ((column > 0) & (column < rows["input_lengths"].unsqueeze(1))).unsqueeze(-1)
    expected = whole.topk(ids.shape[2], dim=-1).values * there
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    # Against float64, at the temperature of 0.8, either order of summation in float32 is up to 4.6e-6 off; both add up.
    assert float((logprobs - expected).abs().max()) < 1e-5
    # Two tokens may be level to the last bits; then either may come first.
    assert float((whole.gather(2, ids) * there - expected).abs().max()) < 1e-5
    assert not (ids * ~there).any()
    assert all(len(set(row)) == ids.shape[2] for row in ids[there.squeeze(-1)].tolist())


def in_order(layout, found, key):
    """The rows of all data-parallel ranks in batch order; ranks with the same rows must agree."""
    named = layouts.grid_of(layout)
    by_place = {}
    for rank, each in enumerate(found):
        rows = by_place.setdefault(named.get_worker_coords(rank)["data"], each[key])
        assert torch.equal(rows, each[key])
    rows = torch.cat([by_place[place] for place in sorted(by_place)])
    order = found[0]["order"]
    return rows if order is None else rows[torch.tensor(order).argsort()]


@pytest.mark.parametrize("name", layouts.tiered("candidates", layouts.CANDIDATES))
class TestOverRanks:
    pytestmark = over_ranks

    def read(self, out, name):
        layout = layouts.LAYOUTS[name]
        files = [out / f"candidates-{name}-{rank}.pt" for rank in range(layout.world)]
        return layout, [torch.load(file, weights_only=False) for file in files]

    def test_topk_tokens_equal_those_of_transformers(self, out, plain, name):
        layout, found = self.read(out, name)
        rows, whole, _, _ = plain(layout.kind)
        ids, logprobs = (in_order(layout, found, key) for key in ("topk_token_ids", "topk_logprobs"))
        assert_topk(ids, logprobs, rows, whole)

    def test_the_gradient_through_candidates_is_that_of_autograd_through_all_logits(self, out, plain, name):
        layout, found = self.read(out, name)
        _, _, loss, expected = plain(layout.kind)
        for rank in found:
            gradients = {key: (rank["before"][key] - rank["after"][key]) / 1e4 for key in rank["before"]}
            assert cases.largest_relative_error(gradients, expected) < 1e-5
        named = layouts.grid_of(layout)
        replicas = {named.get_worker_coords(rank)["data"]: each for rank, each in enumerate(found)}.values()
        for key in ("eval", "step"):
            # Weights of both signs: the sum of terms of order 10 is accurate to 1e-6 of the terms.
            assert sum(each[key].loss for each in replicas) == pytest.approx(loss, rel=1e-5, abs=1e-5)
            assert all(each[key].metrics["untrained"] == 0.0 for each in replicas)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("vocab_size", [125, 60])
def test_tensor_parallel_logits_give_targets_and_topk_without_gathering(out, vocab_size):
    found = [torch.load(out / f"vocabulary-{rank}.pt", weights_only=False)[vocab_size, "several"] for rank in range(2)]
    logits, (targets, weights) = ranks.vocabulary_case(vocab_size)[0].requires_grad_(), ranks.several_case(vocab_size)
    log_p = torch.log_softmax(logits[:, :vocab_size].double() / 0.7, dim=-1)
    (log_p.gather(1, targets) * weights).sum().backward()
    for logprobs, _, topk in found:
        torch.testing.assert_close(logprobs, log_p.detach().gather(1, targets).float(), rtol=0, atol=5e-6)
        for ids, best in topk:
            expected = log_p.detach().topk(best.shape[1], dim=-1)
            torch.testing.assert_close(best, expected.values.float(), rtol=0, atol=5e-6)
            assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found], 1), logits.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "form",
    [
        {"logprob_batch_size": 3, "train_micro_batch_size": 3},
        {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}},
    ],
    ids=["by_count", "token_budget", "packed"],
)
def test_one_rank_has_the_numbers_of_the_backend_on_transformers(policy, models, form):
    rows = cases.make_candidates()
    fields = {**form, "optimizer": cases.SGD, "max_grad_norm": None, "generation": {"temperature": 0.8}}
    ours, theirs = policy("qwen3", **fields), HuggingFacePolicy(str(models / "qwen3"), **fields)
    topk = [each.get_topk_logprobs(rows, cases.K) for each in (ours, theirs)]
    assert topk[0].keys() == topk[1].keys()
    assert torch.equal(topk[0]["topk_token_ids"], topk[1]["topk_token_ids"])
    assert float((topk[0]["topk_logprobs"] - topk[1]["topk_logprobs"]).abs().max()) < 1e-5
    steps, gradients = [], []
    for each in (ours, theirs):
        before = {name: tensor.clone() for name, tensor in each.group.worker.iter_weights()}
        steps.append(each.train(rows, cases.WeightedCandidates()))
        gradients.append({name: (before[name] - tensor) / 1e4 for name, tensor in each.group.worker.iter_weights()})
    assert cases.largest_relative_error(*gradients) < 1e-5
    assert steps[0]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-5, abs=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=2e-6)


def test_topk_above_the_vocabulary_size_and_invalid_candidates_are_errors(policy):
    made = policy("llama")
    for k in (0, cases.VOCAB_SIZE + 1):
        with pytest.raises(DataError, match=rf"The {k} most likely tokens.*vocabulary has {cases.VOCAB_SIZE}"):
            made.get_topk_logprobs(cases.make_rows(), k)
    for token in (cases.VOCAB_SIZE, -1):
        rows = cases.make_candidates()
        rows["candidates"][0, 0, 0] = token
        with pytest.raises(DataError, match=f"token id {token}, outside the {cases.VOCAB_SIZE} tokens"):
            made.train(rows, cases.WeightedCandidates())


def test_a_scalar_head_has_no_topk_or_candidate_logprobs(policy):
    made = policy("qwen3", head="scalar")
    with pytest.raises(NotSupportedError, match="scalar head"):
        made.get_topk_logprobs(cases.make_rows(), cases.K)
    with pytest.raises(NotSupportedError, match="scalar head"):
        made.train(cases.make_candidates(), cases.WeightedCandidates())


def test_a_frozen_policy_can_be_a_teacher(policy, models):
    rows = cases.make_rows()
    found = policy("llama-tied", frozen=True).get_topk_logprobs(rows, cases.K)
    with torch.no_grad():
        whole = cases.plain_distributions(cases.plain_model(models / "llama-tied"), rows)
    assert_topk(found["topk_token_ids"], found["topk_logprobs"], rows, whole)
