"""Every parallel layout equals Transformers: log-probabilities, gradients, optimizer steps, weights."""

from itertools import combinations

import megatron_cases as cases
import megatron_layouts as layouts
import megatron_ranks as ranks
import pytest
import torch

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def plain(models):
    """By kind: the results of Transformers and autograd for the same rows."""
    made = {}

    def of(kind):
        if kind not in made:
            model, rows = cases.plain_model(models / kind), cases.make_rows()
            with torch.no_grad():
                logprobs = cases.plain_logprobs(model, rows)
            weights = {name: tensor.clone() for name, tensor in cases.checkpoint_weights(model).items()}
            loss = cases.plain_loss(model, rows)
            loss.backward()
            gradients = cases.checkpoint_gradients(model)
            norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
            completions = cases.plain_completions(model, cases.make_prompts())
            made[kind] = (rows, logprobs, weights, float(loss), gradients, norm, completions)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def trained(models):
    """By kind: weights and norms after some steps of the backend on Transformers, one rank, microbatches by count."""
    made = {}

    def of(kind):
        if kind not in made:
            worker = HFPolicyWorker(cases.make_context(), HFPolicyConfig(model_name=str(models / kind), **layouts.TRAINING))
            worker.setup()
            results = []
            for number in range(layouts.STEPS):
                rows = cases.make_rows(seed=100 + number)
                results.append(worker.train(rows, cases.NLL(), counts=cases.counts_of(rows))[0])
            made[kind] = results, cases.checkpoint_weights(worker.model.model)
        return made[kind]

    return of


def read(out, name):
    """The layout and the results of its ranks."""
    layout = layouts.LAYOUTS[name]
    return layout, [torch.load(out / f"{name}-{rank}.pt", weights_only=False) for rank in range(layout.world)]


def in_order(layout, found, key):
    """The results of the first rank of every axis except `data`, combined as by the facade."""
    named = layouts.grid_of(layout)
    firsts = [
        rank for rank in range(layout.world) if not any(v for k, v in named.get_worker_coords(rank).items() if k != "data")
    ]
    rows = torch.cat([found[rank][key] for rank in firsts])
    order = found[0]["order"]
    return rows if order is None else rows[torch.tensor(order).argsort()]


def pairs_of_settings(names):
    """Every two settings that some of the layouts have together."""
    return {pair for name in names for pair in combinations(layouts.settings_of(layouts.LAYOUTS[name]).items(), 2)}


def test_the_layouts_of_make_test_have_every_pair_of_settings_of_the_full_matrix():
    cover = layouts.COVER["check"]
    assert cover <= set(layouts.PARITY)
    assert pairs_of_settings(layouts.PARITY) - pairs_of_settings(cover) == set()


@pytest.mark.parametrize("name", layouts.tiered("check", layouts.PARITY))
def test_log_probabilities_are_those_of_transformers(out, plain, name):
    layout, found = read(out, name)
    expected = plain(layout.kind)[1]
    for key in ("logprobs", "reference"):
        logprobs = in_order(layout, found, key)
        # Two orders of summation in float32 over four layers.
        assert float((logprobs - expected).abs().max()) < 5e-6


@pytest.mark.parametrize("name", layouts.tiered("check", layouts.PARITY))
def test_the_gradient_is_that_of_one_plain_backward_pass(out, plain, name):
    layout, found = read(out, name)
    _, _, _, loss, expected, norm, _ = plain(layout.kind)
    for rank in found:
        gradients = {key: (rank["before"][key] - rank["after"][key]) / 1e4 for key in rank["before"]}
        assert cases.largest_relative_error(gradients, expected) < 1e-5
        assert rank["step"].grad_norm == pytest.approx(norm, rel=2e-6)
    named = layouts.grid_of(layout)
    replicas = [r for r in range(layout.world) if not any(v for k, v in named.get_worker_coords(r).items() if k != "data")]
    for key in ("step", "eval"):
        assert sum(found[rank][key].loss for rank in replicas) == pytest.approx(loss, rel=1e-6)
        assert sum(found[rank][key].metrics["nll"] for rank in replicas) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", layouts.tiered("check", [name for name in layouts.PARITY if "cp2" not in name]))
def test_every_rank_samples_what_transformers_samples_greedily(out, plain, name):
    layout, found = read(out, name)
    expected = plain(layout.kind)[6]
    for rank in found:
        answer = rank["sampled"]
        lengths = answer["unpadded_sequence_lengths"].tolist()
        sampled = [ids[:length] for ids, length in zip(answer["output_ids"].tolist(), lengths, strict=True)]
        assert sampled == expected[-len(lengths) :]


@pytest.mark.parametrize("name", layouts.tiered("check", layouts.PARITY))
def test_optimizer_steps_equal_those_of_the_transformers_backend(out, trained, name):
    layout, found = read(out, name)
    results, weights = trained(layout.kind)
    for rank in found:
        # Adam divides by the gradient's own size, so rounding in small gradients comes through whole; 6e-6 was seen.
        assert cases.largest_relative_error(rank["trained"], weights) < 5e-5
        assert [step.lr for step in rank["steps"]] == pytest.approx([step.lr for step in results])
        assert [step.grad_norm for step in rank["steps"]] == pytest.approx([step.grad_norm for step in results], rel=1e-5)


@pytest.mark.parametrize("name", layouts.tiered("check", layouts.PARITY))
def test_weights_are_imported_and_exported_bit_for_bit_on_every_rank(out, plain, name):
    layout, found = read(out, name)
    expected = plain(layout.kind)[2]
    for rank in found:
        assert rank["before"].keys() == expected.keys() == rank["manifest"].keys()
        for key, tensor in rank["before"].items():
            assert torch.equal(tensor, expected[key]), key
            assert (tuple(tensor.shape), "float32") == rank["manifest"][key]
        assert list(rank["some"]) == list(rank["manifest"])[1::3]
        for key, tensor in rank["some"].items():
            assert torch.equal(tensor, rank["after"][key]), key
    assert found[0]["fingerprint"]
    assert not any(rank["fingerprint"] for rank in found[1:])
    assert found[0]["facts"]["num_parameters"] == sum(tensor.numel() for tensor in expected.values())


@pytest.mark.parametrize("vocab_size", [125, 60])
def test_tensor_parallel_logits_give_logprobs_and_gradients_without_gathering(out, vocab_size):
    found = [torch.load(out / f"vocabulary-{rank}.pt")[vocab_size] for rank in range(2)]
    logits, targets, weights = ranks.vocabulary_case(vocab_size)
    logits.requires_grad_()
    log_p = torch.log_softmax(logits[:, :vocab_size].double() / 0.7, dim=-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    (logprobs * weights).sum().backward()
    for rank in found:
        torch.testing.assert_close(rank[0], logprobs.detach().float(), rtol=0, atol=5e-6)
    torch.testing.assert_close(torch.cat([rank[1] for rank in found], 1), logits.grad, rtol=1e-5, atol=2e-6)
