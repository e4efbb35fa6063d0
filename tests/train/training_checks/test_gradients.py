"""What is observed of the gradient of a loss, and whether a gradient of zero can be right."""

import pytest
import torch
from policy_cases import NLL, make_rows

from rl_backends_base.microbatches import reduce_metrics
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import BrokenPromiseError
from rl_train.algorithms.losses.config import DistillationLossConfig
from rl_train.algorithms.losses.distillation import DistillationLossFn
from rl_train.training_checks.checked_loss import ROW_NUMBERS, CheckedLoss
from rl_train.training_checks.gradients import (
    GradientLoss,
    check_observed,
    has_gradient,
)

TOKS = 300.0


def observed(backward, *, early=False, model):
    """Smallest and largest gradient, and rows that it reached, of ten microbatches of four rows."""
    rows = make_rows(40)
    rows[ROW_NUMBERS] = torch.arange(1, 41)
    loss_fn, metrics = CheckedLoss(NLL(), None, model=model), []
    logprobs = -torch.rand(rows["token_mask"].shape).requires_grad_()
    for number in range(10):
        chosen = torch.arange(4 * number, 4 * number + 4)
        loss, found = loss_fn(logprobs[chosen], rows.select_indices(chosen), torch.tensor(40.0), torch.tensor(TOKS))
        if early:
            metrics.append({name: value.clone() for name, value in found.items()})
        backward(loss, number)
        if not early:
            metrics.append(found)
    reduced = reduce_metrics(metrics, loss_fn.metric_reductions)
    return tuple(float(reduced[f"checks/gradient/{name}"]) for name in ("min", "max", "rows"))


def test_the_gradient_that_reaches_the_loss_is_observed_after_it_was_returned():
    assert observed(lambda loss, _: loss.backward(), model="a")[:2] == (1.0, 1.0)
    assert observed(lambda loss, _: (loss / 8).backward(), model="b")[:2] == (0.125, 0.125)
    assert observed(lambda loss, number: (loss * (1 + number)).backward(), model="c")[:2] == (1.0, 10.0)
    assert observed(lambda loss, _: loss.backward(torch.tensor(0.5)), model="d")[:2] == (0.5, 0.5)


def test_metrics_that_are_read_before_the_backward_pass_show_the_gradients_of_earlier_microbatches_and_steps():
    assert observed(lambda loss, _: (loss / 2).backward(), early=True, model="early") == (0.5, 0.5, 0.0)
    assert observed(lambda loss, _: None, early=True, model="early") == (0.5, 0.5, 0.0)
    assert observed(lambda loss, _: None, model="never") == pytest.approx((3e38, -3e38, 0.0))


def check(smallest, largest, rows=0.0, *, scale=1.0):
    check_observed(smallest, largest, rows, of_rows=32.0, scale=scale, where="Step 1: `train` of P")


def test_a_loss_may_only_be_scaled_by_the_declared_factor():
    check(1.0, 1.0, 32.0)
    check(1.0 - 1e-6, 1.0)
    check(2.0, 2.0, scale=2.0)
    check(1024.0, 65536.0, scale="dynamic")
    check(3e38, -3e38)  # nothing was seen
    for smallest, largest, scale in ((0.5, 0.5, 1.0), (1.0, 1.25, 1.0), (1.0, 1.0, 2.0)):
        with pytest.raises(BrokenPromiseError, match="computes the gradient of the loss times"):
            check(smallest, largest, scale=scale)
    with pytest.raises(BrokenPromiseError, match="of the loss of 4 rows only, but 32 rows have a gradient"):
        check(1.0, 1.0, 4.0, scale="dynamic")


def projected(loss_fn, logprobs, rows, **columns):
    rows = BatchedDataDict({**rows, **columns})
    with torch.inference_mode():
        _, metrics = GradientLoss(loss_fn, is_scalar=False)(logprobs, rows, torch.tensor(40.0), torch.tensor(TOKS))
    return float(metrics["projection"])


class Weighted(NLL):
    """The negative log-likelihood with a coefficient for each row."""

    def __init__(self, coefficients):
        self.coefficients = torch.tensor(coefficients)

    def __call__(self, logprobs, data, seqs, toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1) * self.coefficients.unsqueeze(1)
        return -(mask * logprobs).sum() / toks, {}


def test_a_loss_has_a_gradient_unless_it_is_masked_or_cancels_or_all_tokens_are_certain():
    rows = make_rows(2)
    rows["sample_mask"][:] = 1.0
    logprobs = -torch.rand(rows["token_mask"].shape, generator=torch.Generator().manual_seed(1)) - 0.1
    same = rows.select_indices(torch.tensor([0, 0]))

    def judge(coefficients, rows=rows, logprobs=logprobs, grad_norm=0.0):
        return has_gradient(projected(Weighted(coefficients), logprobs, rows), valid_toks=TOKS, grad_norm=grad_norm)

    assert judge([1.0, -1.0])
    assert judge([0.0, 0.3])
    assert not judge([0.0, 0.0])
    assert not judge([1e-7, -1e-7])  # rounding
    assert not judge([1.0, -1.0], grad_norm=0.1)
    equal = logprobs[:1].expand(2, -1)
    assert not judge([1.0, -1.0], same, equal)  # two equal rows, one rewarded and one not
    assert judge([1.0, -0.5], same, equal)
    assert not judge([1.0, 1.0], logprobs=torch.zeros_like(logprobs))  # probability 1: the logits have no gradient


@pytest.mark.parametrize("far", [False, True])
def test_a_student_that_equals_its_teacher_has_no_gradient(far):
    rows = make_rows(4)
    rows["sample_mask"][:] = 1.0
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(*rows["token_mask"].shape, 32, generator=generator)
    teacher = logits.log_softmax(-1)[..., :8]
    student = (logits + far * torch.randn(logits.shape, generator=generator)).log_softmax(-1)[..., :8] + 1e-7
    columns = {"teacher_topk_logprobs": teacher, "candidate_logprobs": student}
    loss_fn = DistillationLossFn(DistillationLossConfig(topk=8))
    metrics = projected(loss_fn, student[..., 0], rows, **columns)
    assert has_gradient(metrics, valid_toks=TOKS, grad_norm=0.0) == far
