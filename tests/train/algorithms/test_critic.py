"""GAE targets for rows with turns, penalties, truncation and dropped rows, worked by hand; and training epochs."""

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import SCHEMA
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.policy_configs import GAEConfig
from rl_train.algorithms.ppo import compute_gae_targets, critic_rows
from rl_train.algorithms.sft import train_epochs


def two_turns(**columns):
    """A row with two turns of two tokens and an environment token between them, and a padded row."""
    batch = BatchedDataDict(
        input_ids=torch.arange(14).reshape(2, 7),
        input_lengths=torch.tensor([7, 4]),
        token_mask=torch.tensor([[0.0, 1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]),
        sample_mask=torch.ones(2),
        rewards=torch.tensor([1.0, -1.0]),
        truncated=torch.tensor([False, True]),
        prev_values=torch.tensor([[0.1, 0.2, 9.0, 0.4, 0.5, 9.0, 9.0], [9.0, 0.3, 0.6, 0.8, 0.0, 0.0, 0.0]]),
    )
    return BatchedDataDict({**batch, **columns})


PLAIN = {"normalize_advantages": False}


def test_gae_uses_the_next_sampled_token_and_puts_the_reward_on_the_last_token():
    found = compute_gae_targets(two_turns(), GAEConfig(lam=0.0, **PLAIN))
    # Row 0: states 0.1, 0.2, 0.4, 0.5 (before tokens 1, 2, 4, 5); row 1: states 0.3, 0.6.
    assert found.advantages[0].tolist() == pytest.approx([0, 0.1, 0.2, 0, 0.1, 0.5, 0])
    assert found.advantages[1].tolist() == pytest.approx([0, 0, 0.3, -1.6, 0, 0, 0])


def test_returns_are_aligned_with_the_positions_of_the_value_head():
    batch = two_turns()
    found = compute_gae_targets(batch, GAEConfig(lam=1.0, **PLAIN))
    assert found.returns[0].tolist() == pytest.approx([1, 1, 0, 1, 1, 0, 0])
    assert found.returns[1].tolist() == pytest.approx([0, -1, -1, 0, 0, 0, 0])
    batch["returns"] = found.returns
    rows = critic_rows(batch)
    assert rows["token_mask"].tolist() == [[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]]
    for key in ("input_ids", "token_mask", "returns", "prev_values"):
        assert str(rows[key].dtype) == f"torch.{SCHEMA[key].dtype}"
        assert rows[key].shape == rows["input_ids"].shape


def test_a_truncated_answer_ends_with_zero_or_a_bootstrapped_value():
    assert compute_gae_targets(two_turns(), GAEConfig(lam=1.0, gamma=0.5, **PLAIN)).advantages[1, 3] == pytest.approx(-1 - 0.6)
    found = compute_gae_targets(two_turns(), GAEConfig(lam=1.0, gamma=0.5, bootstrap_truncated=True, **PLAIN))
    assert found.advantages[1, 3] == pytest.approx(-1 + 0.5 * 0.8 - 0.6)
    assert found.advantages[0, 5] == pytest.approx(1 - 0.5)


def test_penalties_are_rewards_of_their_tokens():
    penalties = torch.tensor([[5.0, 0.1, 0.2, 5.0, 0.3, 0.4, 5.0], [0.0] * 7])
    found = compute_gae_targets(two_turns(token_penalties=penalties), GAEConfig(lam=1.0, **PLAIN))
    assert found.returns[0].tolist() == pytest.approx([0, 0.1, 0, 0.3, 0.6, 0, 0], abs=1e-7)


def test_advantages_are_normalised_over_the_tokens_of_rows_that_are_trained():
    kept = torch.tensor([1.0, 0.0])
    found = compute_gae_targets(two_turns(sample_mask=kept), GAEConfig(lam=0.0))
    four = torch.tensor([0.1, 0.2, 0.1, 0.5], dtype=torch.float64)
    expected = (four - four.mean()) / four.std(correction=0)
    assert found.advantages[0, [1, 2, 4, 5]].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert not found.advantages[1].any()
    assert found.metrics["advantage/mean"] == pytest.approx(float(four.mean()), rel=1e-5)
    assert found.metrics["advantage/std"] == pytest.approx(float(four.std(correction=0)), rel=1e-5)


def test_critic_and_policy_can_use_different_lambdas():
    apart = compute_gae_targets(two_turns(), GAEConfig(lam=0.0, value_lam=1.0, **PLAIN))
    assert torch.equal(apart.advantages, compute_gae_targets(two_turns(), GAEConfig(lam=0.0, **PLAIN)).advantages)
    assert torch.equal(apart.returns, compute_gae_targets(two_turns(), GAEConfig(lam=1.0, **PLAIN)).returns)
    # Four tokens and two: 1 - 1 / (1/2 n) is 0.5 and 0.
    adaptive = compute_gae_targets(two_turns(), GAEConfig(length_adaptive_alpha=0.5, **PLAIN)).advantages
    assert torch.equal(adaptive[0], compute_gae_targets(two_turns(), GAEConfig(lam=0.5, **PLAIN)).advantages[0])
    assert torch.equal(adaptive[1], compute_gae_targets(two_turns(), GAEConfig(lam=0.0, **PLAIN)).advantages[1])


class RecordingModel:
    """A model that records the rows it gets and takes two optimizer steps per call."""

    def __init__(self):
        self.calls, self.orders = [], []

    def prepare_for_training(self):
        self.calls.append("prepare")

    def finish_training(self):
        self.calls.append("finish")

    def train(self, data, loss_fn):
        self.calls.append("train")
        self.orders.append(data["input_ids"][:, 0].tolist())
        n = float(len(self.orders))
        return {
            "loss": n,
            "grad_norm": 10 * n,
            "lr": 1 / n,
            "num_optimizer_steps": 2,
            "global_valid_seqs": 8.0,
            "global_valid_toks": 40.0,
            "metrics": {"ratio/mean": n, "ratio/max": n, "ratio/min": n},
        }


def test_each_epoch_is_one_call_with_an_order_from_seed_and_step():
    rows = BatchedDataDict(input_ids=torch.arange(8).reshape(8, 1))
    one, again, other = RecordingModel(), RecordingModel(), RecordingModel()
    found = train_epochs(one, ClippedPGLossFn(), rows, passes=3, seed=(5, 2))
    assert one.calls == ["train", "train", "train"]
    assert found == {
        "loss": 2.0,
        "grad_norm": 20.0,
        "lr": 1 / 3,
        "num_optimizer_steps": 6,
        "global_valid_seqs": 24.0,
        "global_valid_toks": 120.0,
        "skipped_valid_toks": 0,
        "metrics": {"ratio/mean": 2.0, "ratio/max": 3.0, "ratio/min": 1.0},
    }
    assert all(sorted(order) == list(range(8)) for order in one.orders)
    assert len({tuple(order) for order in one.orders}) == 3
    train_epochs(again, ClippedPGLossFn(), rows, passes=3, seed=(5, 2))
    train_epochs(other, ClippedPGLossFn(), rows, passes=3, seed=(5, 3))
    assert again.orders == one.orders
    assert not set(map(tuple, other.orders)) & set(map(tuple, one.orders))
