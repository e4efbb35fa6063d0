"""Preference losses compared with an independent float64 loop and hand-worked pairs, and their mathematical properties."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossType
from rl_train.algorithms.losses.preference_configs import (
    DPOLossConfig,
    HingeLossConfig,
    IPOLossConfig,
    ORPOLossConfig,
    SimPOLossConfig,
)
from rl_train.algorithms.losses.supervised import DPOLossFn, HingeLossFn, IPOLossFn, ORPOLossFn, SimPOLossFn

LOSSES = {
    "dpo": DPOLossFn(DPOLossConfig(reference_policy_kl_penalty=0.3)),
    "dpo of means": DPOLossFn(DPOLossConfig(reference_policy_kl_penalty=2.0, preference_average_log_probs=True)),
    "cdpo with sft": DPOLossFn(DPOLossConfig(label_smoothing=0.2, sft_loss_weight=0.5, preference_loss_weight=0.7)),
    "sft of sums": DPOLossFn(DPOLossConfig(sft_loss_weight=0.5, sft_average_log_probs=False)),
    "ipo": IPOLossFn(IPOLossConfig(reference_policy_kl_penalty=0.4)),
    "hinge": HingeLossFn(HingeLossConfig(reference_policy_kl_penalty=0.5)),
    "simpo": SimPOLossFn(SimPOLossConfig(beta=2.5, gamma=0.6, label_smoothing=0.1)),
    "orpo": ORPOLossFn(ORPOLossConfig(preference_loss_weight=0.4)),
}


def random_pairs(seed, pairs=3, length=6):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=rng)

    rows = 2 * pairs
    logprobs = -0.05 - 3 * draw(rows, length)
    token_mask = (draw(rows, length) > 0.3).float()
    token_mask[:, -1] = 1.0  # an answer has a token
    data = BatchedDataDict(
        {
            "token_mask": token_mask,
            "sample_mask": (draw(pairs) > 0.2).float().repeat_interleave(2),
            "reference_policy_logprobs": logprobs + 2 * (draw(rows, length) - 0.5),
        }
    )
    mask = token_mask * data["sample_mask"].unsqueeze(-1)
    return logprobs, data, data["sample_mask"].sum(), mask.sum()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def pair_by_loop(name, config, chosen, rejected, chosen_reference, rejected_reference):
    """The loss of a pair from lists of token log-probabilities, and whether the chosen answer has the higher score."""
    average = getattr(config, "preference_average_log_probs", name in ("simpo", "orpo"))

    def of(tokens):
        return sum(tokens) / len(tokens) if average else sum(tokens)

    if name == "orpo":
        odds = [math.exp(of(tokens)) / (1 - math.exp(of(tokens))) for tokens in (chosen, rejected)]
        margin = math.log(odds[0] / odds[1])
        cost = -log_sigmoid(margin)
    elif name == "simpo":
        margin = config.beta * of(chosen) - config.beta * of(rejected)
        led = margin - config.gamma
        cost = -(1 - config.label_smoothing) * log_sigmoid(led) - config.label_smoothing * log_sigmoid(-led)
    else:
        beta = config.reference_policy_kl_penalty
        log_ratio = (of(chosen) - of(rejected)) - (of(chosen_reference) - of(rejected_reference))
        margin = beta * log_ratio
        if name == "ipo":
            cost = (log_ratio - 1 / (2 * beta)) ** 2
        elif name == "hinge":
            cost = max(0.0, 1 - margin)
        else:
            cost = -(1 - config.label_smoothing) * log_sigmoid(margin) - config.label_smoothing * log_sigmoid(-margin)
    likelihood = sum(chosen) / len(chosen) if config.sft_average_log_probs else sum(chosen)
    return config.preference_loss_weight * cost - config.sft_loss_weight * likelihood, margin


def by_loop(name, config, logprobs, data):
    costs, leads = [], []
    for row in range(0, logprobs.shape[0], 2):
        if not data["sample_mask"][row]:
            continue

        def tokens(values, row):
            return [float(values[row, t]) for t in range(values.shape[1]) if data["token_mask"][row, t]]

        reference = data["reference_policy_logprobs"]
        cost, margin = pair_by_loop(
            name,
            config,
            tokens(logprobs, row),
            tokens(logprobs, row + 1),
            tokens(reference, row),
            tokens(reference, row + 1),
        )
        costs.append(cost)
        leads.append(margin)
    count = max(len(costs), 1)
    return sum(costs) / count, sum(lead > 0 for lead in leads) / count, min(map(abs, leads), default=1.0)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_loss_over_pairs_equals_a_loop_over_tokens(name, seed):
    logprobs, data, seqs, toks = random_pairs(seed)
    loss, metrics = LOSSES[name](logprobs.double(), data, seqs, toks)
    expected, accuracy, closest = by_loop(name.split()[0], LOSSES[name].config, logprobs.double(), data)
    assume(closest > 1e-3)  # nearer scores count as equal
    # The batch is float32 (24 bits) and logarithms of odds amplify a little.
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(metrics["preference/accuracy"]) == pytest.approx(accuracy)


def one_pair(chosen, rejected, reference=0.0):
    logprobs = torch.tensor([[chosen], [rejected]])
    data = BatchedDataDict(
        {
            "token_mask": torch.ones(2, 1),
            "sample_mask": torch.ones(2),
            "reference_policy_logprobs": torch.full((2, 1), reference),
        }
    )
    return logprobs, data, torch.tensor(2.0), torch.tensor(2.0)


def test_pairs_by_hand():
    # margin 0.5 (-1 + 2) = 0.5 against an even reference
    config = {"reference_policy_kl_penalty": 0.5}
    loss, metrics = DPOLossFn(DPOLossConfig(**config))(*one_pair(-1.0, -2.0, -1.5))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert float(metrics["preference/margin"]) == pytest.approx(0.5)
    assert float(metrics["preference/score_chosen"]) == pytest.approx(0.25)
    assert float(HingeLossFn(HingeLossConfig(**config))(*one_pair(-1.0, -2.0))[0]) == pytest.approx(0.5)
    # 1 nat, and 1 / (2 * 0.5) = 1 nat is wanted
    assert float(IPOLossFn(IPOLossConfig(**config))(*one_pair(-1.0, -2.0))[0]) == pytest.approx(0.0)
    # probabilities 1/2 and 1/5: odds 1 and 1/4
    loss, metrics = ORPOLossFn(ORPOLossConfig())(*one_pair(math.log(1 / 2), math.log(1 / 5)))
    assert float(metrics["loss/preference"]) == pytest.approx(math.log(1 + 1 / 4), rel=1e-5)
    assert float(loss) == pytest.approx(0.1 * math.log(1 + 1 / 4) + math.log(2), rel=1e-5)


def test_a_policy_that_equals_its_reference_is_right_half_the_time():
    logprobs, data, seqs, toks = random_pairs(1)
    data["reference_policy_logprobs"] = logprobs.clone()
    loss, metrics = DPOLossFn()(logprobs, data, seqs, toks)
    assert float(loss) == pytest.approx(math.log(2))
    assert float(metrics["preference/accuracy"]) == pytest.approx(0.5)


def test_log_odds_of_a_certain_answer_are_finite():
    x, data, seqs, toks = one_pair(0.0, -1.0)
    x.requires_grad_()
    loss, _ = ORPOLossFn()(x, data, seqs, toks)
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(x.grad).all()


def test_reference_logprobs_are_requested_only_if_the_loss_uses_them():
    asked = {name for name, loss_fn in LOSSES.items() if "reference_policy_logprobs" in loss_fn.required_keys}
    assert asked == set(LOSSES) - {"simpo", "orpo"}
    assert all(loss_fn.rows_per_unit == 2 and loss_fn.loss_type is LossType.SEQUENCE_LEVEL for loss_fn in LOSSES.values())


def test_a_loss_without_terms_is_an_error():
    with pytest.raises(ValueError, match="nothing to minimize"):
        DPOLossConfig(preference_loss_weight=0.0)
