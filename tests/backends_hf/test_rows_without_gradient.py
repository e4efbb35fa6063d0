"""Rows whose advantages are all zero are not computed, and the optimizer step is the same as if they were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_base.replica_rows import TrainingRows
from rl_backends_hf import HuggingFacePolicy
from rl_train.algorithms.losses import ClippedPGLossConfig, ClippedPGLossFn

FORMS = {
    "by_count": {"train_micro_batch_size": 3},
    "token_budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
}


class AllRows(ClippedPGLossFn):
    """The same loss, but every row is computed."""

    def rows_with_gradient(self, data):
        return None


def loss_of(kind, **config):
    loss = kind(ClippedPGLossConfig(**config))
    loss.on_policy = True
    return loss


@pytest.fixture(scope="module")
def start(model_folder):
    """A separate policy with momentum, weight decay and a learning-rate schedule."""

    def make(**fields):
        return HuggingFacePolicy(
            model_folder("llama"),
            # With this eps, Adam does not divide gradients that are only rounding by their own size.
            optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}},
            scheduler={"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 9}},
            **fields,
        )

    return make


def make_rows(parts, zero, seed=5):
    """Eight rows, those listed in `zero` with advantages 0."""
    rows = parts.make_rows(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows["advantages"] = torch.randn(rows["token_mask"].shape, generator=generator)
    rows["advantages"][list(zero)] = 0.0
    rows["generation_logprobs"] = -torch.rand(rows["token_mask"].shape, generator=generator)
    return rows


def weights_of(policy):
    return {name: tensor.clone() for name, tensor in policy.group._worker.iter_weights()}


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_step_is_the_same_without_computing_rows_with_zero_advantages(parts, start, form):
    skipping, computing = start(**FORMS[form]), start(**FORMS[form])
    # Some rows, all rows (momentum and decay alone move the weights), no row; then two steps in one call, one of them all zero.
    plans = [({0, 3, 4, 6}, 8), (set(range(8)), 8), (set(), 8), ({0, 1, 2, 3, 5}, 4)]
    for seed, (zero, gbs) in enumerate(plans):
        rows = make_rows(parts, zero, seed)
        one = skipping.train(rows, loss_of(ClippedPGLossFn), gbs=gbs)
        other = computing.train(rows, loss_of(AllRows), gbs=gbs)
        for name in ("lr", "num_optimizer_steps", "global_valid_seqs", "global_valid_toks"):
            assert one[name] == other[name]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-7)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5, abs=1e-7)
        assert other["skipped_valid_toks"] == 0
        assert (one["skipped_valid_toks"] > 0) == bool(zero)
    assert skipping.weight_version == computing.weight_version == 5
    # Microbatches with other rows add up gradients in another order, which differ by about 1e-7.
    for name, tensor in weights_of(computing).items():
        torch.testing.assert_close(weights_of(skipping)[name], tensor, rtol=1e-5, atol=1e-6)


def test_statistics_of_tokens_cover_the_computed_rows(parts, start):
    policy = start()
    names = ("entropy/sampled", "mismatch/kl", "mismatch/max", "ratio/mean", "ratio/min", "ratio/max")
    # Without any gradient, the first row with trained tokens is computed.
    for zero, computed in (({0, 3, 4, 6}, [2, 5, 7]), (set(range(8)), [0])):
        rows = make_rows(parts, zero)
        expected = policy.train(rows.select_indices(computed), loss_of(AllRows), eval_mode=True)["metrics"]
        result = policy.train(rows, loss_of(ClippedPGLossFn))
        for name in names:
            assert result["metrics"][name] == pytest.approx(expected[name], rel=1e-5)
        tokens = rows["token_mask"].sum(1) * rows["sample_mask"]
        assert result["skipped_valid_toks"] == float(tokens.sum() - tokens[computed].sum())
    assert result["loss"] == 0.0


def test_rows_are_computed_if_another_term_needs_them(parts):
    rows = make_rows(parts, {0, 3})

    class WithEntropy(ClippedPGLossFn):
        def __call__(self, logprobs, data, seqs, toks):
            loss, metrics = super().__call__(logprobs, data, seqs, toks)
            return loss + 0.01 * (logprobs * data["token_mask"]).sum() / toks, metrics

    assert loss_of(ClippedPGLossFn).rows_with_gradient(rows).tolist() == [False, False, True, False, *[True] * 4]
    assert loss_of(ClippedPGLossFn, reference_policy_kl_penalty=0.1).rows_with_gradient(rows) is None
    assert loss_of(WithEntropy).rows_with_gradient(rows) is None
    in_reward = loss_of(ClippedPGLossFn, reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    assert in_reward.rows_with_gradient(rows) is not None


def test_evaluation_computes_all_rows(parts, start):
    result = start().train(make_rows(parts, {0, 3}), loss_of(ClippedPGLossFn), eval_mode=True)
    assert result["skipped_valid_toks"] == 0


@settings(max_examples=40)
@given(zero=st.sets(st.integers(0, 11)), steps=st.sampled_from([1, 2, 3]), budget=st.sampled_from([None, 24, 60]))
def test_every_rank_gets_the_same_number_of_microbatches_and_all_rows_with_a_gradient(parts, zero, steps, budget):
    rows = parts.make_rows(12, seed=3)
    rows["sample_mask"] = torch.ones(12)
    rows["advantages"] = torch.ones(rows["token_mask"].shape)
    rows["advantages"][list(zero)] = 0.0
    rows["generation_logprobs"] = torch.zeros(rows["token_mask"].shape)
    rows["number"] = torch.arange(12)
    chosen = TrainingRows.all_of(rows, 12 // steps).with_gradient(loss_of(ClippedPGLossFn), multiple_of=2)
    plan = {}
    if budget is not None:
        plan["dynamic_batching_args"] = {
            "max_tokens_per_microbatch": budget,
            "sequence_length_round": 4,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
        }
    shards = chosen.rows.shard_by_batch_size(2, chosen.rows_per_step, **plan)
    shards = shards[0] if plan else shards
    assert shards[0].size == shards[1].size or plan
    for step in range(steps):
        computed = [shard.get_batch(step) for shard in shards]
        numbers = sorted(int(n) for part in computed for n, m in zip(part["number"], part["sample_mask"], strict=True) if m > 0)
        first = step * 12 // steps
        needed = [row for row in range(first, first + 12 // steps) if row not in zero]
        assert set(needed) <= set(numbers)
        assert len(numbers) == len(set(numbers))
        assert all(part.size for part in computed)
        if plan:
            assert len(computed[0].micro_batch_indices[0]) == len(computed[1].micro_batch_indices[0])
    assert sum(chosen.computed_toks) <= sum(count.valid_toks for count in chosen.counts)
