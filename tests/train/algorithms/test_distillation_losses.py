"""Distillation losses compared with a float64 loop over tokens, and their mathematical properties."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError
from rl_core.interfaces.policy import LossType
from rl_train.algorithms import DistillationLossFn
from rl_train.algorithms.losses.config import DistillationLossConfig

FORMS = {
    "forward": {"divergence": "forward_kl"},
    "reverse": {"divergence": "reverse_kl"},
    "mixed": {"divergence": "mixed_kl", "mixed_kl_weight": 0.3},
    "jsd": {"divergence": "jsd", "jsd_beta": 0.2},
}
BEYOND = ("bucket", "renormalize")
V, K = 11, 4
# Sums over a few dozen float32 tokens, of terms of the order of one.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def loss_fn(**config):
    return DistillationLossFn(DistillationLossConfig(**config))


def make_batch(seed, *, rows=4, width=7, k=K, spread=2.0):
    """Rows with prompts and padding, one of them masked out; a student's and a teacher's logits over V tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    student = spread * torch.randn(rows, width, V, generator=generator, dtype=torch.float64)
    teacher = spread * torch.randn(rows, width, V, generator=generator, dtype=torch.float64)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    column = torch.arange(width)
    tokens = torch.randint(0, V, (rows, width), generator=generator)
    log_p, top = torch.log_softmax(teacher, -1), torch.log_softmax(teacher, -1).topk(k, dim=-1)
    batch = BatchedDataDict(
        input_ids=tokens,
        token_mask=((column >= 2) & (column < lengths[:, None])).float(),
        sample_mask=torch.tensor([1.0, 0.0, *[1.0] * (rows - 2)]),
        teacher_topk_token_ids=top.indices,
        teacher_topk_logprobs=top.values.float(),
        teacher_logprobs=log_p.gather(2, tokens[..., None])[..., 0].float(),
    )
    return batch, student, teacher


def as_a_backend(batch, student):
    """The inputs a backend passes to the loss: log-probabilities of the row's tokens and of the candidates in the batch."""
    log_q = torch.log_softmax(student, -1).float()
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[..., None]
    batch["candidate_logprobs"] = log_q.gather(2, batch["teacher_topk_token_ids"]) * mask
    return log_q.gather(2, batch["input_ids"][..., None])[..., 0] * mask[..., 0]


def counts(batch):
    return batch["sample_mask"].sum(), (batch["token_mask"] * batch["sample_mask"][:, None]).sum()


def evaluate(loss, batch, student):
    return loss(as_a_backend(batch, student), batch, *counts(batch))


def by_hand(p, q, form, beyond):
    """The divergence of two lists of V probabilities on the top K of p, by definition, in Python floats."""
    top = sorted(range(V), key=lambda token: -p[token])[:K]
    if beyond == "bucket":
        a, b = [p[i] for i in top], [q[i] for i in top]
        a, b = [*a, 1 - sum(a)], [*b, 1 - sum(b)]
    else:
        a, b = ([x[i] / sum(x[j] for j in top) for i in top] for x in (p, q))

    def kl(x, y):
        return sum(u * math.log(u / v) for u, v in zip(x, y, strict=True))

    if form == "forward":
        return kl(a, b)
    if form == "reverse":
        return kl(b, a)
    if form == "mixed":
        return 0.3 * kl(a, b) + 0.7 * kl(b, a)
    m = [0.2 * u + 0.8 * v for u, v in zip(a, b, strict=True)]
    return 0.2 * kl(a, m) + 0.8 * kl(b, m)


def trained(batch):
    """(row, position) of every token that counts, row by row."""
    for row in range(batch.size):
        if batch["sample_mask"][row]:
            yield row, [t for t in range(batch["token_mask"].shape[1]) if batch["token_mask"][row, t]]


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_divergence_is_its_definition_token_by_token(form, beyond, token_level, seed):
    batch, student, teacher = make_batch(seed)
    found, metrics = evaluate(loss_fn(topk=K, beyond_topk=beyond, token_level_loss=token_level, **FORMS[form]), batch, student)
    p, q = torch.softmax(teacher, -1).tolist(), torch.softmax(student, -1).tolist()
    rows = [[by_hand(p[r][t], q[r][t], form, beyond) for t in places] for r, places in trained(batch)]
    of_all = [value for row in rows for value in row]
    expected = sum(of_all) / len(of_all) if token_level else sum(sum(row) / len(row) for row in rows) / len(rows)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), **CLOSE)
    for name, kind in (("kl_forward", "forward"), ("kl_reverse", "reverse")):
        values = [by_hand(p[r][t], q[r][t], kind, beyond) for r, places in trained(batch) for t in places]
        assert float(metrics[f"distillation/{name}"]) == pytest.approx(sum(values) / len(values), rel=1e-5, abs=2e-6)


def test_candidate_metrics_equal_their_definitions():
    batch, student, teacher = make_batch(3)
    _, metrics = evaluate(loss_fn(topk=K), batch, student)
    p, q = torch.softmax(teacher, -1).tolist(), torch.softmax(student, -1).tolist()
    places = [(r, t) for r, row in trained(batch) for t in row]
    agree, mass_p, mass_q, surprise = 0, 0.0, 0.0, 0.0
    for r, t in places:
        top = sorted(range(V), key=lambda token: -p[r][t][token])[:K]
        agree += max(top, key=lambda token: q[r][t][token]) == top[0]
        mass_p += sum(p[r][t][i] for i in top)
        mass_q += sum(q[r][t][i] for i in top)
        surprise -= math.log(q[r][t][int(batch["input_ids"][r, t])])
    names = ("argmax_agreement", "topk_mass_teacher", "topk_mass_student")
    found = [float(metrics[f"distillation/{name}"]) for name in names] + [float(metrics["entropy/sampled"])]
    assert found == pytest.approx([x / len(places) for x in (agree, mass_p, mass_q, surprise)], rel=1e-5)


def test_the_sampled_form_is_a_policy_gradient_with_the_log_ratio_to_the_teacher_as_advantage():
    batch, student, teacher = make_batch(5)
    loss = loss_fn(divergence="reverse_kl", topk=None)
    previous = torch.log_softmax(student + 0.1 * torch.randn(student.shape, dtype=torch.float64), -1)
    batch["prev_logprobs"] = previous.gather(2, batch["input_ids"][..., None])[..., 0].float()
    found, metrics = evaluate(loss, batch, student)
    log_p, log_q = torch.log_softmax(teacher, -1).tolist(), torch.log_softmax(student, -1).tolist()
    total, kl, number = 0.0, 0.0, 0
    for r, places in trained(batch):
        for t in places:
            token = int(batch["input_ids"][r, t])
            before, now, wanted = float(previous[r, t, token]), log_q[r][t][token], log_p[r][t][token]
            total += -math.exp(now - before) * (wanted - before)
            kl += now - wanted
            number += 1
    assert float(found) == pytest.approx(total / number, rel=1e-5)
    assert float(metrics["distillation/kl_sampled"]) == pytest.approx(kl / number, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_the_sampled_form_is_finite_for_huge_importance_ratios_if_teacher_and_policy_agree(log_ratio):
    batch, student, _ = make_batch(5)
    logprobs = as_a_backend(batch, student).requires_grad_()
    batch["prev_logprobs"] = logprobs.detach() - log_ratio
    batch["teacher_logprobs"] = batch["prev_logprobs"]  # an advantage of zero
    found, _ = loss_fn(divergence="reverse_kl", topk=None)(logprobs, batch, *counts(batch))
    [gradient] = torch.autograd.grad(found, logprobs)
    assert found.item() == 0.0
    assert torch.isfinite(gradient).all()


def test_on_policy_the_sampled_form_has_the_gradient_of_the_k2_estimator():
    batch, student, _ = make_batch(6)
    loss = loss_fn(divergence="reverse_kl", topk=None)
    loss.on_policy = True
    assert loss.required_keys == {"teacher_logprobs"}
    logits = student.clone().requires_grad_()
    [found] = torch.autograd.grad(evaluate(loss, batch, logits)[0], logits)
    log_ratio = torch.log_softmax(logits, -1).gather(2, batch["input_ids"][..., None])[..., 0] - batch["teacher_logprobs"]
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    [expected] = torch.autograd.grad((0.5 * log_ratio.square() * mask).sum() / mask.sum(), logits)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_on_all_tokens_the_expected_gradient_of_the_sampled_form_is_that_of_the_reverse_kl():
    # One position; every token in turn is the sampled one, weighted by its probability: the expectation, without sampling.
    generator = torch.Generator().manual_seed(8)
    student, teacher = (torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(2))
    logits = student.clone().requires_grad_()
    log_q, log_p = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    [expected] = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), logits, retain_graph=True)
    loss = loss_fn(divergence="reverse_kl", topk=None)
    loss.on_policy = True
    surrogate = torch.zeros((), dtype=torch.float64)
    one = torch.ones(())
    for token in range(V):
        batch = BatchedDataDict(
            token_mask=torch.ones(1, 1), sample_mask=torch.ones(1), teacher_logprobs=log_p[token].view(1, 1)
        )
        surrogate = surrogate + log_q[token].detach().exp() * loss(log_q[token].view(1, 1), batch, one, one)[0]
    [found] = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_with_the_whole_vocabulary_loss_and_gradient_are_those_of_the_exact_divergence(form):
    batch, student, teacher = make_batch(9, k=V)
    p = torch.log_softmax(teacher, -1)

    def exact(logits):
        q = torch.log_softmax(logits, -1)
        forward, reverse = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
        m = torch.log(0.2 * p.exp() + 0.8 * q.exp())
        value = {
            "forward": forward,
            "reverse": reverse,
            "mixed": 0.3 * forward + 0.7 * reverse,
            "jsd": 0.2 * (p.exp() * (p - m)).sum(-1) + 0.8 * (q.exp() * (q - m)).sum(-1),
        }[form]
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        return (value * mask).sum() / mask.sum()

    for beyond in BEYOND:
        logits, plain = student.clone().requires_grad_(), student.clone().requires_grad_()
        found, _ = evaluate(loss_fn(topk=V, beyond_topk=beyond, **FORMS[form]), batch, logits)
        expected = exact(plain)
        # The bucket has a mass of 1e-5 on both sides if there is no remaining mass.
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        [ours], [theirs] = torch.autograd.grad(found, logits), torch.autograd.grad(expected, plain)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 10_000),
    spread=st.floats(0.0, 30.0),
    form=st.sampled_from(sorted(FORMS)),
    beyond=st.sampled_from(BEYOND),
)
@settings(max_examples=60, deadline=None)
def test_divergences_are_finite_non_negative_and_zero_for_equal_models(seed, spread, form, beyond):
    batch, student, teacher = make_batch(seed, spread=spread)
    loss = loss_fn(topk=K, beyond_topk=beyond, **FORMS[form])
    logits = student.clone().requires_grad_()
    found, metrics = evaluate(loss, batch, logits)
    [gradient] = torch.autograd.grad(found, logits)
    assert bool(torch.isfinite(gradient).all())
    assert all(math.isfinite(float(value)) for value in metrics.values())
    # Log-probabilities of tens of nats are known to 4e-6 in float32, and so are their differences.
    assert float(found.detach()) >= -1e-4
    to_itself, metrics = evaluate(loss, batch, teacher)
    assert abs(float(to_itself)) < 1e-4
    assert float(metrics["distillation/argmax_agreement"]) == 1.0


@given(seed=st.integers(0, 10_000), form=st.sampled_from(["forward", "reverse"]))
@settings(max_examples=40, deadline=None)
def test_the_divergence_grows_with_topk_and_is_bounded_by_the_exact_one(seed, form):
    seen = []
    for k in (1, 3, 6, V):
        batch, student, _ = make_batch(seed, k=k)
        seen.append(float(evaluate(loss_fn(topk=k, **FORMS[form]), batch, student)[0]))
    assert all(few <= many + 2e-5 for few, many in itertools.pairwise(seen))


def test_the_generalized_jsd_converges_to_forward_and_reverse_kl():
    batch, student, _ = make_batch(12)
    forward, reverse = (float(evaluate(loss_fn(topk=K, **FORMS[form]), batch, student)[0]) for form in ("forward", "reverse"))
    for beta, share, limit in ((1e-3, 1e-3, forward), (1 - 1e-3, 1e-3, reverse)):
        found = float(evaluate(loss_fn(topk=K, divergence="jsd", jsd_beta=beta), batch, student)[0]) / share
        assert found == pytest.approx(limit, rel=0.02)  # the next term of the expansion is of the order of the share


def test_student_mass_outside_topk_is_penalized_only_with_the_bucket():
    batch, _, teacher = make_batch(13)
    student = teacher.clone()
    outside = torch.ones_like(student).scatter(2, batch["teacher_topk_token_ids"], 0.0)
    student += 3.0 * outside
    for form in FORMS.values():
        assert float(evaluate(loss_fn(topk=K, beyond_topk="bucket", **form), batch, student)[0]) > 0.05
        assert abs(float(evaluate(loss_fn(topk=K, beyond_topk="renormalize", **form), batch, student)[0])) < 1e-6


def test_the_loss_reads_only_the_keys_that_its_form_needs():
    candidates = loss_fn(topk=2)
    assert candidates.candidates_key == "teacher_topk_token_ids"
    assert candidates.required_keys == {"teacher_topk_token_ids", "teacher_topk_logprobs"}
    assert candidates.config.num_candidates == 2
    sampled = loss_fn(topk=None, divergence="reverse_kl", token_level_loss=False)
    assert sampled.candidates_key is None
    assert sampled.required_keys == {"teacher_logprobs", "prev_logprobs"}
    assert sampled.config.num_candidates == 0
    assert sampled.loss_type is LossType.SEQUENCE_LEVEL


def test_a_backend_without_candidates_is_named_as_the_cause():
    batch, student, _ = make_batch(15)
    logprobs = as_a_backend(batch, student)
    del batch["candidate_logprobs"]
    with pytest.raises(NotSupportedError, match=r"topk_logprobs.*topk: null"):
        loss_fn(topk=K)(logprobs, batch, *counts(batch))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"topk": None}, "only the sampled tokens"),
        ({"topk": None, "divergence": "jsd"}, "needs the teacher's most likely tokens"),
        ({"topk": None, "divergence": "reverse_kl", "beyond_topk": "renormalize"}, "does not use beyond_topk"),
        ({"divergence": "reverse_kl", "jsd_beta": 0.1}, "does not use jsd_beta"),
        ({"divergence": "jsd", "mixed_kl_weight": 0.1}, "does not use mixed_kl_weight"),
        ({"topk": 1, "beyond_topk": "renormalize"}, "a single renormalized token"),
        ({"topk": 0}, "greater than or equal to 1"),
        ({"divergence": "jsd", "jsd_beta": 1.0}, "less than 1"),
    ],
)
def test_unsupported_loss_forms_are_errors_with_a_fix(config, message):
    with pytest.raises(ValidationError, match=message):
        DistillationLossConfig(**config)
