"""The canary: what an engine computes with, against its policy, after every refit; on the model of the quickstart."""

from pathlib import Path

import pytest
import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.config.schema import GenerationConfig
from rl_core.errors import WeightSyncError
from rl_core.weights.canary import EXACT_TOLERANCE, ROUNDED_TOLERANCE, make_canary
from rl_core.weights.shared_memory import SharedMemoryTransport
from rl_core.weights.synchronizer import WeightSynchronizer

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
WORDS = range(2, 18)


@pytest.fixture(scope="module")
def sides():
    generation = GenerationConfig(backend="hf", temperature=0.7)
    policy = HuggingFacePolicy(str(MODEL), max_total_sequence_length=16, generation=generation)
    engine = HuggingFaceGeneration(str(MODEL), max_new_tokens=5, max_model_len=16, temperature=0.7)
    yield policy, engine
    engine.shutdown()
    policy.shutdown()


def synchronizer(sides, **options):
    options = {"num_receivers": 1, "max_length": 16, "exact": True, **options}
    return WeightSynchronizer(
        *sides,
        transports=[SharedMemoryTransport],
        policy_capabilities=["shared_memory"],
        generation_capabilities=["shared_memory"],
        prove=False,  # the canary alone
        canary=lambda: make_canary(WORDS, **options),
    )


@pytest.mark.parametrize("greedy", [False, True])
def test_equal_weights_are_as_far_apart_as_rounding(sides, greedy):
    assert synchronizer(sides, greedy=greedy).sync()["refit/canary_error"] < 1e-5


@pytest.mark.parametrize("wrong", [lambda tensor: tensor.mul_(1.02), lambda tensor: tensor.fill_(float("nan"))])
def test_an_engine_that_computes_with_other_weights_than_it_was_sent_is_stopped(sides, wrong, monkeypatch):
    worker = sides[1].group.worker

    def spoil():
        wrong(worker.named_weights()["model.layers.0.mlp.down_proj.weight"].data)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "weights_changed", spoil)
        with pytest.raises(WeightSyncError) as caught:
            synchronizer(sides).sync()
    # A policy that samples nonsense is stopped by the sampler itself, before the canary compares.
    assert "canary_tolerance" in str(caught.value) or "not finite" in str(caught.value) or "NaN" in str(caught.value)
    assert synchronizer(sides).sync()["refit/canary_error"] < 1e-5


def test_what_is_allowed_follows_the_coarser_side_or_the_config(sides):
    assert make_canary(WORDS, num_receivers=1, max_length=16, exact=True).tolerance == EXACT_TOLERANCE
    assert make_canary(WORDS, num_receivers=1, max_length=16, exact=False).tolerance == ROUNDED_TOLERANCE
    with pytest.raises(WeightSyncError, match=r"allowed: 1e-12"):
        synchronizer(sides, tolerance=1e-12).sync()


def test_every_replica_gets_prompts_of_its_own_that_fit_and_are_the_same_in_every_run():
    canary = make_canary(WORDS, num_receivers=3, max_length=16, exact=True)
    ids = canary.rows["input_ids"]
    assert len({tuple(row) for row in ids.tolist()}) == len(ids) == 12
    assert set(ids.flatten().tolist()) <= set(WORDS)
    assert int((canary.rows["input_lengths"] + canary.rows["max_new_tokens"]).max()) <= 16
    again = make_canary(WORDS, num_receivers=3, max_length=16, exact=True)
    assert torch.equal(ids, again.rows["input_ids"])
    assert make_canary(WORDS, num_receivers=1, max_length=2, exact=True).rows["input_ids"].shape == (4, 1)
