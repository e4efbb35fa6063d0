"""The KTO loss compared with the formula of its paper in float64, and the mismatched rows from which the KL is estimated."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import ImageInputs, RowImage
from rl_core.interfaces.policy import LossType
from rl_train.algorithms.kto import mismatched_rows
from rl_train.algorithms.losses.preference_configs import KTOLossConfig
from rl_train.algorithms.losses.supervised import KTOLossFn

WITHIN = 1e-6
"""Both sides compute in float64; weights of labels are float32, which has a relative error of 6e-8."""


def labelled(seed, rows=5, length=6, kl=0.7):
    """Random rows in float64, of which some are masked out."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    logprobs = -0.05 - 3 * draw(rows, length)
    token_mask = (draw(rows, length) > 0.3).double()
    token_mask[:, -1] = 1.0  # an answer has a token
    data = BatchedDataDict(
        {
            "token_mask": token_mask,
            "sample_mask": (draw(rows) > 0.2).double(),
            "reference_policy_logprobs": logprobs + 2 * (draw(rows, length) - 0.5),
            "desirable": (draw(rows) > 0.5).double(),
            "kl_estimates": torch.full((rows,), kl, dtype=torch.float64),
        }
    )
    mask = token_mask * data["sample_mask"].unsqueeze(-1)
    return logprobs, data, data["sample_mask"].sum(), mask.sum()


def by_the_paper(config, logprobs, data):
    """Section 4: the mean of lambda_y - v(x, y) over the rows, and the gradient of each token's log-probability, as lists."""
    beta, kept = config.reference_policy_kl_penalty, [row for row in range(len(logprobs)) if data["sample_mask"][row]]
    total, gradient = 0.0, [[0.0] * logprobs.shape[1] for _ in range(len(logprobs))]
    for row in kept:
        trained = [t for t in range(logprobs.shape[1]) if data["token_mask"][row, t]]
        ratio = sum(float(logprobs[row, t]) - float(data["reference_policy_logprobs"][row, t]) for t in trained)
        z, is_desirable = float(data["kl_estimates"][row]), bool(data["desirable"][row])
        weight = config.desirable_weight if is_desirable else config.undesirable_weight
        value = 1 / (1 + math.exp(-beta * (ratio - z if is_desirable else z - ratio)))
        total += weight - weight * value
        for t in trained:
            gradient[row][t] = (-1 if is_desirable else 1) * weight * beta * value * (1 - value) / len(kept)
    return total / max(len(kept), 1), gradient


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    beta=st.floats(0.01, 3.0),
    weights=st.tuples(st.floats(0.1, 4.0), st.floats(0.1, 4.0)),
    kl=st.floats(0.0, 20.0),
)
def test_the_loss_and_its_gradient_are_those_of_the_paper(seed, beta, weights, kl):
    config = KTOLossConfig(reference_policy_kl_penalty=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
    logprobs, data, seqs, toks = labelled(seed, kl=kl)
    logprobs.requires_grad_()
    loss, _ = KTOLossFn(config)(logprobs, data, seqs, toks)
    loss.backward()
    expected, gradient = by_the_paper(config, logprobs.detach(), data)
    assert float(loss.detach()) == pytest.approx(expected, rel=WITHIN, abs=WITHIN)
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=WITHIN, atol=1e-9)


def test_a_policy_that_equals_its_reference_has_half_the_weight_as_loss_and_no_margin():
    logprobs, data, seqs, toks = labelled(3, kl=0.0)
    data["reference_policy_logprobs"] = logprobs.clone()
    loss, metrics = KTOLossFn(KTOLossConfig(desirable_weight=3.0, undesirable_weight=3.0))(logprobs, data, seqs, toks)
    assert float(loss) == pytest.approx(1.5)
    assert KTOLossFn().reported_metrics({name: float(value) for name, value in metrics.items()})["kto/margin"] == 0.0


@pytest.mark.parametrize(("desirable", "shift", "expected"), [(1.0, 400.0, 0.0), (1.0, -400.0, 2.0), (0.0, 400.0, 3.0)])
def test_far_from_the_reference_the_loss_saturates_without_a_gradient(desirable, shift, expected):
    logprobs, data, _, toks = labelled(5, kl=0.0)
    data["sample_mask"], data["desirable"] = torch.ones(5), torch.full((5,), desirable)
    data["reference_policy_logprobs"] = logprobs - shift
    logprobs.requires_grad_()
    loss, _ = KTOLossFn(KTOLossConfig(desirable_weight=2.0, undesirable_weight=3.0))(logprobs, data, torch.tensor(5.0), toks)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert float(logprobs.grad.abs().max()) < 1e-12


def test_rewards_of_each_label_are_means_over_its_own_rows_in_every_split_of_a_batch():
    logprobs, data, seqs, toks = labelled(8, rows=9, kl=1.5)
    data["accuracies"] = torch.linspace(0, 1, 9, dtype=torch.float64)
    loss_fn = KTOLossFn(KTOLossConfig(reference_policy_kl_penalty=0.2))
    parts = [
        loss_fn(logprobs[rows], BatchedDataDict({key: value[rows] for key, value in data.items()}), seqs, toks)[1]
        for rows in ([0, 1], [2], [3, 4, 5, 6, 7, 8])
    ]
    summed = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    reported = loss_fn.reported_metrics(summed)
    kept, good = data["sample_mask"] > 0, data["desirable"] > 0
    assert 0 < int((kept & good).sum()) < int(kept.sum()), "both labels occur"
    rewards = 0.2 * ((logprobs - data["reference_policy_logprobs"]) * data["token_mask"]).sum(-1)
    expected = {
        "kto/reward_desirable": float(rewards[kept & good].mean()),
        "kto/reward_undesirable": float(rewards[kept & ~good].mean()),
        "kto/desirable_frac": float(good[kept].double().mean()),
        "kto/kl": 1.5,
        "kto/accuracy": float(data["accuracies"][kept].mean()),
    }
    expected["kto/margin"] = expected["kto/reward_desirable"] - expected["kto/reward_undesirable"]
    assert reported == pytest.approx(expected)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_label_without_rows_has_no_mean_reward_and_there_is_no_margin(label):
    logprobs, data, seqs, toks = labelled(2)
    data["desirable"] = torch.full((5,), label)
    _, metrics = KTOLossFn()(logprobs, data, seqs, toks)
    reported = KTOLossFn().reported_metrics({name: float(value) for name, value in metrics.items()})
    present = "kto/reward_desirable" if label else "kto/reward_undesirable"
    assert {name for name in reported if "reward" in name or "margin" in name} == {present}


def test_the_loss_is_a_mean_over_answers_and_needs_the_reference():
    assert KTOLossFn().loss_type is LossType.SEQUENCE_LEVEL
    assert KTOLossFn().required_keys == {"reference_policy_logprobs", "desirable", "kl_estimates"}
    assert KTOLossConfig().needs_reference


def batch_of(*rows, width=9):
    """Rows of (prompt, answer), each a list of tokens; a third item is `sample_mask`."""
    made = {key: [] for key in ("input_ids", "token_mask", "input_lengths", "sample_mask")}
    for prompt, answer, *kept in rows:
        padding = width - len(prompt) - len(answer)
        made["input_ids"].append([*prompt, *answer] + [0] * padding)
        made["token_mask"].append([0.0] * len(prompt) + [1.0] * len(answer) + [0.0] * padding)
        made["input_lengths"].append(len(prompt) + len(answer))
        made["sample_mask"].append(float(kept[0]) if kept else 1.0)
    return BatchedDataDict({key: torch.tensor(column) for key, column in made.items()})


def pairs_in(rows):
    """The (prompt, answer) of each row, in their order."""
    columns = zip(rows["input_ids"].tolist(), rows["token_mask"].tolist(), rows["input_lengths"].tolist(), strict=True)
    return [(tuple(ids[: mask.index(1.0)]), tuple(ids[mask.index(1.0) : length])) for ids, mask, length in columns]


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=2)
ANSWERS = st.lists(st.integers(4, 9), min_size=1, max_size=4)
ROWS = st.lists(st.tuples(PROMPTS, ANSWERS), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, order=st.randoms(use_true_random=False))
def test_mismatched_rows_depend_neither_on_the_order_nor_on_rows_that_are_not_trained(rows, order):
    shuffled = [*rows, ([1, 2, 3], [4], False), ([3], [5, 5], False)]
    order.shuffle(shuffled)
    found = mismatched_rows(batch_of(*rows), max_length=9)
    again = mismatched_rows(batch_of(*shuffled, width=12), max_length=9)
    assert (found is None) == (again is None)
    if found is not None:
        assert found.keys() == again.keys()
        assert all(torch.equal(found[key], again[key]) for key in found)


@settings(max_examples=80, deadline=None)
@given(rows=ROWS)
def test_no_prompt_gets_its_own_answer_and_no_answer_is_used_twice(rows):
    found = mismatched_rows(batch_of(*rows), max_length=9)
    prompts = [tuple(prompt) for prompt, _ in rows]
    most = max(map(prompts.count, prompts))
    own = {(tuple(prompt), tuple(answer)) for prompt, answer in rows}
    pairs = [] if found is None else pairs_in(found)
    # As many rows as can be matched: those of the most frequent prompt only with the others.
    assert len(pairs) == (len(rows) if 2 * most <= len(rows) else len(rows) - (2 * most - len(rows)))
    for column, given_ in ((0, prompts), (1, [tuple(answer) for _, answer in rows])):
        used = [pair[column] for pair in pairs]
        assert all(used.count(value) <= given_.count(value) for value in used)
    with_others = {(p, a) for p in prompts for q, a in own if q != p}
    assert set(pairs) <= with_others


def test_a_mismatched_row_that_is_too_long_loses_its_end_and_a_batch_of_one_prompt_has_none():
    rows = mismatched_rows(batch_of(([1, 1, 1, 1, 1], [4]), ([2], [5, 6, 7])), max_length=7)
    assert set(pairs_in(rows)) == {((1, 1, 1, 1, 1), (5, 6)), ((2,), (4,))}
    assert rows["input_lengths"].max() == 7
    assert mismatched_rows(batch_of(([1], [4]), ([1], [5]), ([2], [6], False)), max_length=9) is None


def test_untrained_tokens_within_an_answer_stay_untrained_with_another_prompt():
    batch = batch_of(([1], [4, 5, 6]), ([2, 2], [7]))
    batch["token_mask"][0, 2] = 0.0  # such as the result of a tool
    rows = mismatched_rows(batch, max_length=9)
    [row] = [row for row, ids in enumerate(rows["input_ids"].tolist()) if ids[0] == 2]
    assert rows["token_mask"][row].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]


def picture(digest):
    """An image at the second token of a row."""
    return RowImage(digest=digest, start=1, length=2, placeholder_id=3, num_placeholders=2, inputs=ImageInputs())


def test_prompts_with_equal_tokens_and_other_images_are_other_prompts_and_keep_their_images():
    batch = batch_of(([1, 3, 3, 2], [4]), ([1, 3, 3, 2], [5]), ([1, 2], [6]))
    batch["images"] = [[picture("red")], [picture("blue")], None]
    rows = mismatched_rows(batch, max_length=9)
    assert rows is not None, "the text of two prompts is equal, but not their images"
    shown = [tuple(image.digest for image in images or ()) for images in rows["images"]]
    assert sorted(zip(shown, (prompt for prompt, _ in pairs_in(rows)), strict=True)) == [
        ((), (1, 2)),
        (("blue",), (1, 3, 3, 2)),
        (("red",), (1, 3, 3, 2)),
    ]
    batch["images"] = [[picture("red")], [picture("red")], [picture("red")]]
    batch["sample_mask"][2] = 0.0
    assert mismatched_rows(batch, max_length=9) is None
    assert "images" not in mismatched_rows(batch_of(([1], [4]), ([2], [5])), max_length=9)
