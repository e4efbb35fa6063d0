"""Every way of dividing a model gives what Transformers gives: log-probabilities, gradients, ten optimizer steps, weights."""

import pytest
import torch

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.worker import HFPolicyWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

TWO = [
    "tp2", "tp2-qwen2", "tp2-sp", "tp2-sp-packed", "tp2-budget", "pp2", "pp2-packed", "pp2-uneven", "interleaved",
    "interleaved-packed", "dp2", "dp2-packed", "dp2-distributed", "dp2-overlap", "cp2", "cp2-packed", "ep2",
    "ep2-mixtral-packed", "moe-tp2",
]  # fmt: skip
FOUR = ["tp2-pp2", "tp2-pp2-packed", "pp2-dp2", "tp2-cp2-packed", "tp2-ep2"]


@pytest.fixture(scope="module")
def out(launch, models, tmp_path_factory):
    """What two and then four real processes did, by layout and rank."""
    folder = tmp_path_factory.mktemp("parity")
    launch.run_ranks("ranks.py", 2, models, folder, [f"check:{name}" for name in TWO], ports=2 * len(TWO), timeout_s=240)
    launch.run_ranks("ranks.py", 4, models, folder, [f"check:{name}" for name in FOUR], ports=2 * len(FOUR), timeout_s=240)
    return folder


@pytest.fixture(scope="module")
def plain(parts, models):
    """By kind: what Transformers and autograd alone make of the same rows."""
    made = {}

    def of(kind):
        if kind not in made:
            model, rows = parts.plain_model(models / kind), parts.make_rows()
            with torch.no_grad():
                logprobs = parts.plain_logprobs(model, rows)
            weights = {name: tensor.clone() for name, tensor in parts.checkpoint_weights(model).items()}
            loss = parts.plain_loss(model, rows)
            loss.backward()
            gradients = parts.checkpoint_gradients(model)
            norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
            made[kind] = (rows, logprobs, weights, float(loss), gradients, norm)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def trained(parts, ranks_room, models):
    """By kind: weights and norms after ten steps of the backend on Transformers, one rank, microbatches by count."""
    made = {}

    def of(kind):
        if kind not in made:
            worker = HFPolicyWorker(parts.make_context(), HFPolicyConfig(model_name=str(models / kind), **ranks_room.TRAINING))
            worker.setup()
            results = []
            for number in range(ranks_room.STEPS):
                rows = parts.make_rows(seed=100 + number)
                results.append(worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0])
            made[kind] = results, parts.checkpoint_weights(worker._scoring.model)
        return made[kind]

    return of


def read(ranks_room, out, name):
    """The layout, and what each of its ranks found."""
    layout = ranks_room.LAYOUTS[name]
    return layout, [torch.load(out / f"{name}-{rank}.pt", weights_only=False) for rank in range(layout.world)]


def in_order(ranks_room, layout, found, key):
    """What the ranks at the first place of every axis but `data` found, as the facade puts it together."""
    named = ranks_room.grid(ranks_room.MegatronConfig(**layout.megatron), layout.world)
    firsts = [
        rank for rank in range(layout.world) if not any(v for k, v in named.get_worker_coords(rank).items() if k != "data")
    ]
    rows = torch.cat([found[rank][key] for rank in firsts])
    order = found[0]["order"]
    return rows if order is None else rows[torch.tensor(order).argsort()]


@pytest.mark.parametrize("name", TWO + FOUR)
def test_log_probabilities_are_those_of_transformers(ranks_room, out, plain, name):
    layout, found = read(ranks_room, out, name)
    expected = plain(layout.kind)[1]
    for key in ("logprobs", "reference"):
        logprobs = in_order(ranks_room, layout, found, key)
        # Two orders of summation in float32 over four layers.
        assert float((logprobs - expected).abs().max()) < 5e-6


@pytest.mark.parametrize("name", TWO + FOUR)
def test_the_gradient_is_that_of_one_plain_backward_pass(parts, ranks_room, out, plain, name):
    layout, found = read(ranks_room, out, name)
    _, _, _, loss, expected, norm = plain(layout.kind)
    for rank in found:
        gradients = {key: (rank["before"][key] - rank["after"][key]) / 1e4 for key in rank["before"]}
        assert parts.largest_relative_error(gradients, expected) < 1e-5
        assert rank["step"].grad_norm == pytest.approx(norm, rel=2e-6)
    named = ranks_room.grid(ranks_room.MegatronConfig(**layout.megatron), layout.world)
    replicas = [r for r in range(layout.world) if not any(v for k, v in named.get_worker_coords(r).items() if k != "data")]
    for key in ("step", "eval"):
        assert sum(found[rank][key].loss for rank in replicas) == pytest.approx(loss, rel=1e-6)
        assert sum(found[rank][key].metrics["nll"] for rank in replicas) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", TWO + FOUR)
def test_ten_steps_lead_where_they_lead_the_backend_on_transformers(parts, ranks_room, out, trained, name):
    layout, found = read(ranks_room, out, name)
    results, weights = trained(layout.kind)
    for rank in found:
        # Adam divides by the gradient's own size, so rounding in small gradients comes through whole; 6e-6 was seen.
        assert parts.largest_relative_error(rank["trained"], weights) < 5e-5
        assert [step.lr for step in rank["steps"]] == pytest.approx([step.lr for step in results])
        assert [step.grad_norm for step in rank["steps"]] == pytest.approx([step.grad_norm for step in results], rel=1e-5)


@pytest.mark.parametrize("name", TWO + FOUR)
def test_weights_go_in_and_out_exact_to_the_bit_on_every_rank(ranks_room, out, plain, name):
    layout, found = read(ranks_room, out, name)
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
