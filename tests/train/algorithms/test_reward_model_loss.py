"""The reward-model loss compared with an independent float64 loop and hand-worked pairs, and its mathematical properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossType
from rl_train.algorithms.losses.preference_configs import BradleyTerryLossConfig
from rl_train.algorithms.losses.supervised import BradleyTerryLossFn
from rl_train.algorithms.rm import mask_to_last_tokens

LOSSES = {
    "plain": BradleyTerryLossFn(),
    "centred": BradleyTerryLossFn(BradleyTerryLossConfig(centring_weight=0.3)),
}


def random_pairs(seed, pairs=4, length=6, *, spread=3.0):
    rng = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    values = spread * torch.randn(rows, length, generator=rng)
    data = BatchedDataDict(
        {
            "input_lengths": torch.randint(1, length + 1, (rows,), generator=rng),
            "token_mask": torch.ones(rows, length),
            "sample_mask": (torch.rand(pairs, generator=rng) > 0.2).float().repeat_interleave(2),
            "margins": (2 * torch.rand(pairs, generator=rng) * (torch.rand(pairs, generator=rng) > 0.5)).repeat_interleave(2),
        }
    )
    mask_to_last_tokens(None, data)
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    return values, data, data["sample_mask"].sum(), mask.sum()


def by_loop(values, data, weight):
    """Loss, fraction of correctly ranked pairs, mean margin and mean scores, in Python floats."""
    losses, right, leads, chosen_scores, rejected_scores = [], [], [], [], []
    for row in range(0, len(values), 2):
        if not data["sample_mask"][row]:
            continue
        chosen = float(values[row][int(data["input_lengths"][row]) - 1])
        rejected = float(values[row + 1][int(data["input_lengths"][row + 1]) - 1])
        x = chosen - rejected - float(data["margins"][row])
        likelihood = -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))
        losses.append(-likelihood + weight * (chosen + rejected) ** 2)
        right.append(1.0 if chosen > rejected else 0.0)
        leads.append(chosen - rejected)
        chosen_scores.append(chosen)
        rejected_scores.append(rejected)
    count = max(len(losses), 1)
    return [sum(each) / count for each in (losses, right, leads, chosen_scores, rejected_scores)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), pairs=st.integers(1, 6), spread=st.sampled_from([0.1, 3.0, 40.0]))
def test_the_loss_equals_a_loop_over_pairs(name, seed, pairs, spread):
    values, data, seqs, toks = random_pairs(seed, pairs, spread=spread)
    loss, metrics = LOSSES[name](values.double(), data, seqs, toks)
    expected = by_loop(values.double(), data, LOSSES[name].config.centring_weight)
    found = [loss, *(metrics[f"preference/{key}"] for key in ("accuracy", "margin", "score_chosen", "score_rejected"))]
    # The margins are float32, of 24 bits.
    assert [float(each) for each in found] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_gradient_is_the_error_probability_at_last_tokens_only(seed):
    values, data, seqs, toks = random_pairs(seed)
    x = values.double().requires_grad_()
    BradleyTerryLossFn()(x, data, seqs, toks)[0].backward()
    expected = torch.zeros_like(values, dtype=torch.float64)
    for row in range(0, len(values), 2):
        places = [int(n) - 1 for n in data["input_lengths"][row : row + 2]]
        lead = float(values[row][places[0]]) - float(values[row + 1][places[1]]) - float(data["margins"][row])
        wrong = 1 / (1 + math.exp(lead)) * float(data["sample_mask"][row]) / max(float(seqs) / 2, 1.0)
        expected[row, places[0]], expected[row + 1, places[1]] = -wrong, wrong
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-7)


def one_pair(chosen, rejected, margin=0.0):
    data = {"input_lengths": [1, 1], "margins": [margin] * 2}
    columns = {name: torch.tensor(column) for name, column in data.items()}
    masks = {"token_mask": torch.ones(2, 1), "sample_mask": torch.ones(2)}
    return torch.tensor([[chosen], [rejected]]), BatchedDataDict({**columns, **masks}), torch.tensor(2.0), torch.tensor(2.0)


def test_pairs_by_hand():
    loss, metrics = BradleyTerryLossFn()(*one_pair(2.0, 1.0))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)))
    assert float(metrics["preference/accuracy"]) == 1.0
    assert float(metrics["preference/margin"]) == 1.0
    # A margin equal to the score difference gives probability 1/2; the pair still counts as correct.
    loss, metrics = BradleyTerryLossFn()(*one_pair(2.0, 1.0, 1.0))
    assert float(loss) == pytest.approx(math.log(2))
    assert float(metrics["preference/accuracy"]) == 1.0
    loss, metrics = BradleyTerryLossFn(BradleyTerryLossConfig(centring_weight=0.01))(*one_pair(2.0, 1.0))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)) + 0.09)
    assert float(metrics["loss/centring"]) == pytest.approx(9.0)
    assert float(metrics["loss/preference"]) == pytest.approx(math.log(1 + math.exp(-1)))


def test_equal_scores_have_accuracy_one_half():
    loss, metrics = BradleyTerryLossFn()(*one_pair(0.0, 0.0))
    assert float(loss) == pytest.approx(math.log(2))
    assert float(metrics["preference/accuracy"]) == 0.5


def test_scores_far_apart_have_a_finite_loss_and_gradient():
    values, *rest = one_pair(-1e4, 1e4)
    values.requires_grad_()
    loss, _ = BradleyTerryLossFn()(values, *rest)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e4)
    assert values.grad.squeeze().tolist() == pytest.approx([-1.0, 1.0])


def test_without_trained_pairs_the_loss_is_zero():
    values, data, _, _ = random_pairs(3)
    data["sample_mask"] = torch.zeros_like(data["sample_mask"])
    loss, metrics = LOSSES["centred"](values, data, torch.tensor(0.0), torch.tensor(0.0))
    assert float(loss) == 0.0
    assert all(float(value) == 0.0 for value in metrics.values())


def test_pairs_stay_together_and_the_mean_is_over_pairs():
    loss_fn = BradleyTerryLossFn()
    assert loss_fn.rows_per_unit == 2
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    assert loss_fn.required_keys == {"margins"}


def test_the_loss_uses_only_last_tokens():
    data = BatchedDataDict({"input_lengths": torch.tensor([3, 1, 5]), "token_mask": torch.ones(3, 5)})
    mask_to_last_tokens(None, data)
    assert data["token_mask"].tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
