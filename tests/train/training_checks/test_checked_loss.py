"""The loss around a run's loss: what it counts and compares, and when it refuses a step."""

import math

import pytest
import torch
from policy_cases import NLL, make_rows

from rl_backends_base.microbatches import reduce_metrics
from rl_train.logprob_agreement import largest_error, sampling_error
from rl_train.training_checks.agreement import EXACT_MEAN, LARGEST, Agreement, Numbers
from rl_train.training_checks.checked_loss import (
    COMPARISON,
    ROW_NUMBERS,
    WITH_ENGINE,
    CheckedLoss,
    ExpectedCounts,
    Limits,
    sums_to_hold,
)


def rows_with_columns(num_rows=40):
    rows = make_rows(num_rows)
    rows[ROW_NUMBERS] = torch.arange(1, rows.size + 1)
    rows[COMPARISON] = torch.full_like(rows["token_mask"], WITH_ENGINE)
    rows["generation_logprobs"] = -torch.rand(rows["token_mask"].shape, generator=torch.Generator().manual_seed(2))
    return rows


def held_loss(rows, limits=LARGEST, ranks=1):
    return CheckedLoss(NLL(), limits, hold=sums_to_hold(rows, limits, ranks))


def run(loss, rows, logprobs, size=4):
    """All microbatches of `size` rows: losses and reduced metrics."""
    losses, metrics = [], []
    for start in range(0, rows.size, size):
        chosen = torch.arange(start, min(start + size, rows.size))
        one, more = loss(logprobs[chosen], rows.select_indices(chosen), torch.tensor(39.0), torch.tensor(300.0))
        losses.append(float(one))
        metrics.append(more)
    return losses, {name: float(number) for name, number in reduce_metrics(metrics, loss.metric_reductions).items()}


def test_it_returns_the_loss_and_its_metrics_unchanged_and_counts_each_row_once():
    rows = rows_with_columns()
    logprobs = rows["generation_logprobs"] + 1e-6
    expected, plain = run(NLL(), rows, logprobs)
    losses, metrics = run(held_loss(rows), rows, logprobs)
    assert losses == expected
    assert metrics.items() >= plain.items()
    counts = ExpectedCounts.of(rows, rows.size)
    assert {name: metrics[f"checks/{name}"] for name in counts.computed} == counts.computed
    assert metrics["checks/toks_min"] == metrics["checks/toks_max"] == 300.0
    numbers = Numbers.of(metrics, "engine", 1, LARGEST)
    assert numbers.tokens == counts.computed["tokens"]
    assert numbers.mean == pytest.approx(1e-6, rel=0.1)
    assert not numbers.refused


@pytest.mark.parametrize(
    ("change", "row"),
    [
        pytest.param(lambda logprobs: logprobs.index_fill(0, torch.tensor([7]), -4.0), 8, id="a row far off"),
        pytest.param(lambda logprobs: logprobs.index_fill(0, torch.tensor([7]), math.nan), 0, id="not finite"),
        pytest.param(lambda logprobs: logprobs - 0.6, 0, id="all tokens"),
    ],
)
def test_a_step_beyond_a_limit_has_a_loss_of_nan(change, row):
    rows = rows_with_columns()
    rows["input_lengths"][:] = 20
    rows["token_mask"][:] = 1.0
    losses, metrics = run(held_loss(rows), rows, change(rows["generation_logprobs"]))
    assert math.isnan(sum(losses))
    numbers = Numbers.of(metrics, "engine", 1, LARGEST)
    assert numbers.refused
    assert numbers.row == row


def test_a_step_is_held_by_its_whole_mean_and_not_by_that_of_its_first_microbatches():
    rows = rows_with_columns()
    rows["token_mask"][:] = 1.0
    limits = Limits(mean=0.5, mean_tokens=1, row=100.0, row_tokens=1)
    early = rows["generation_logprobs"].clone()
    early[:8] -= 2.0  # a mean of 2 over two of ten microbatches, 0.4 over all
    losses, metrics = run(held_loss(rows, limits), rows, early)
    assert all(map(math.isfinite, losses))
    assert not Numbers.of(metrics, "engine", 1, limits).refused
    losses, metrics = run(held_loss(rows, limits), rows, rows["generation_logprobs"] - 0.51)
    assert [math.isfinite(loss) for loss in losses] == [True] * 9 + [False]
    assert Numbers.of(metrics, "engine", 1, limits).refused


def test_one_of_several_ranks_holds_a_step_whose_mean_is_beyond_the_limit():
    rows = rows_with_columns()
    rows["token_mask"][:] = 1.0
    limits = Limits(mean=0.5, mean_tokens=1, row=100.0, row_tokens=1)
    logprobs = rows["generation_logprobs"] - torch.linspace(0.0, 1.04, 40).unsqueeze(1)
    sums, halves = sums_to_hold(rows, limits, 2), (torch.arange(20), torch.arange(20, 40))
    for chosen, is_held in zip(halves, (False, True), strict=True):
        losses, _ = run(CheckedLoss(NLL(), limits, hold=sums), rows.select_indices(chosen), logprobs[chosen])
        assert math.isnan(sum(losses)) == is_held


def test_tokens_that_may_not_be_compared_are_ignored():
    rows = rows_with_columns()
    rows[COMPARISON][:] = 0.0
    losses, metrics = run(held_loss(rows), rows, rows["generation_logprobs"] - 5.0)
    assert all(map(math.isfinite, losses))
    assert Numbers.of(metrics, "engine", 1, LARGEST).tokens == 0


def test_the_sampling_error_is_that_of_the_comparison_before_a_run():
    for tokens in (1, 11, 100, 5000):
        assert float(sampling_error(torch.tensor(float(tokens)))) == pytest.approx(
            math.log(largest_error(1.05, tokens)) / math.log(1.05), rel=1e-3
        )


def means(*values):
    return [Numbers(tokens=100, mean=value, worst_row=0.0, row=0, invalid=0, refused=False, doubtful=False) for value in values]


def test_the_limit_in_doubt_is_three_times_the_median_of_the_first_five_steps_until_the_canary_moves_it():
    agreement = Agreement(sides="bfloat16", exact=False, has_canary=True)
    assert agreement.limits(1).doubtful is None
    for numbers in means(0.01, 0.05, 0.04, 0.03, 0.02, 0.4):
        agreement.record(numbers)
    assert agreement.limits(7).doubtful == pytest.approx(0.09)
    agreement.accept(7, means(0.1)[0], 0.05)
    assert agreement.limits(16).doubtful is None
    assert agreement.limits(17).doubtful == pytest.approx(0.3)

    restored = Agreement(sides="bfloat16", exact=False, has_canary=True)
    restored.load_state_dict(agreement.state_dict())
    assert restored.limits(17).doubtful == pytest.approx(0.3)
    assert restored.limits(16).doubtful is None
    other = Agreement(sides="float32", exact=False, has_canary=True)
    other.load_state_dict(agreement.state_dict())
    assert other.limits(17).doubtful is None


def test_exact_arithmetic_has_one_strict_limit_and_needs_no_canary():
    limits = Agreement(sides="float32", exact=True, has_canary=True).limits(9)
    assert (limits.mean, limits.doubtful) == (EXACT_MEAN, None)
    without = Agreement(sides="bfloat16", exact=False, has_canary=False)
    without.record(means(0.01)[0])
    assert without.limits(2).doubtful is None
