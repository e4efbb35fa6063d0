"""The value loss compared with an independent float64 loop, and its mathematical properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import MseValueLossFn
from rl_train.algorithms.losses import MseValueLossConfig


def drawn(seed, rows=4, length=6):
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=rng)
    data = BatchedDataDict(
        token_mask=(torch.rand(rows, length, generator=rng) > 0.3).float(),
        sample_mask=(torch.rand(rows, generator=rng) > 0.2).float(),
        returns=torch.randn(rows, length, generator=rng),
        prev_values=values + 0.4 * torch.randn(rows, length, generator=rng),
    )
    return values, data


def counts(data):
    return data["sample_mask"].sum(), (data["token_mask"] * data["sample_mask"].unsqueeze(-1)).sum()


def by_loop(values, data, clip):
    total, number, clipped = 0.0, 0, 0
    for b in range(values.shape[0]):
        for t in range(values.shape[1]):
            if not data["token_mask"][b, t] * data["sample_mask"][b]:
                continue
            value, target, before = (float(x[b, t]) for x in (values, data["returns"], data["prev_values"]))
            errors = [(value - target) ** 2]
            if clip is not None:
                errors.append((min(max(value, before - clip), before + clip) - target) ** 2)
                clipped += errors[1] > errors[0]
            total, number = total + max(errors) / 2, number + 1
    return total / max(number, 1), clipped / max(number, 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), clip=st.sampled_from([None, 0.1, 0.5, 100.0]))
def test_the_loss_equals_a_loop_over_states(seed, clip):
    values, data = drawn(seed)
    loss, metrics = MseValueLossFn(MseValueLossConfig(cliprange_value=clip))(values, data, *counts(data))
    expected, clipped = by_loop(values, data, clip)
    # Float32 sums of two dozen squares against float64.
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(metrics["loss/value"]) == float(loss)
    if clip is None:
        assert "value/clipped_frac" not in metrics
    else:
        assert float(metrics["value/clipped_frac"]) == pytest.approx(clipped, abs=1e-6)


def test_the_gradient_is_the_error_and_zero_if_clipped():
    values = torch.tensor([[0.5, 1.0, 1.0, 9.0]], requires_grad=True)
    data = BatchedDataDict(
        token_mask=torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        sample_mask=torch.ones(1),
        returns=torch.tensor([[2.0, 2.0, 0.0, 0.0]]),
        prev_values=torch.tensor([[0.5, 0.0, 0.0, 0.0]]),
    )
    loss, metrics = MseValueLossFn(MseValueLossConfig(cliprange_value=0.2))(values, data, torch.tensor(1.0), torch.tensor(3.0))
    loss.backward()
    # Unchanged; moved by 1 towards the return, with no gain beyond 0.2; moved by 1 away from it, at full cost.
    assert values.grad.tolist() == [pytest.approx([-1.5 / 3, 0.0, 1.0 / 3, 0.0])]
    assert float(metrics["value/clipped_frac"]) == pytest.approx(1 / 3)
    assert float(metrics["value/mean"]) == pytest.approx(2.5 / 3)
    assert float(metrics["value/return_mean"]) == pytest.approx(4 / 3)


def test_old_values_are_used_only_with_clipping():
    assert MseValueLossFn().required_keys == {"returns", "prev_values"}
    assert MseValueLossFn(MseValueLossConfig(cliprange_value=None)).required_keys == {"returns"}
