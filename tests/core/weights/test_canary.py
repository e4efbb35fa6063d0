"""The canary compares engine and policy after every refit, on the quickstart model."""

import json
from pathlib import Path

import pytest
import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WeightSyncError
from rl_train.algorithms import NLLLossFn
from rl_train.weight_sync import canary as canary_module
from rl_train.weight_sync.canary import (
    EXACT_TOLERANCE,
    FIRST_TOLERANCE,
    LEAST_TOLERANCE,
    MARGIN,
    CanaryCalibration,
    RefitCanary,
    TemperatureCorrection,
    make_canary,
)
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

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
        WeightSender(sides[0], SharedMemoryTransport, prove=False),
        canary=RefitCanary(lambda: make_canary(WORDS, **options)),
    )


@pytest.mark.parametrize("greedy", [False, True])
def test_the_canary_error_of_equal_weights_is_only_rounding(sides, greedy):
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


def test_float32_sides_have_a_fixed_tolerance_and_a_configured_one_replaces_it(sides):
    assert make_canary(WORDS, num_receivers=1, max_length=16, exact=True).tolerance == EXACT_TOLERANCE
    assert make_canary(WORDS, num_receivers=1, max_length=16, exact=False).tolerance is None
    assert make_canary(WORDS, num_receivers=1, max_length=16, exact=False, tolerance=0.3).tolerance == 0.3
    with pytest.raises(WeightSyncError, match=r"allowed: 1e-12"):
        synchronizer(sides, tolerance=1e-12).sync()


def test_each_replica_gets_its_own_fixed_canary_prompts_that_fit():
    canary = make_canary(range(2, 1000), num_receivers=3, max_length=16, exact=True)
    ids = canary.rows["input_ids"]
    assert len({tuple(row) for row in ids.tolist()}) == len(ids) == 12
    assert set(ids.flatten().tolist()) <= set(range(2, 1000))
    assert int((canary.rows["input_lengths"] + canary.rows["max_new_tokens"]).max()) <= 16
    again = make_canary(range(2, 1000), num_receivers=3, max_length=16, exact=True)
    assert torch.equal(ids, again.rows["input_ids"])
    assert make_canary(WORDS, num_receivers=1, max_length=2, exact=True).rows["input_ids"].shape == (4, 1)
    # Every second prompt repeats itself, so that a repetition penalty has something to change.
    assert torch.equal(ids[1::2, :4], ids[1::2, 4:])
    assert not torch.equal(ids[::2, :4], ids[::2, 4:])


def rounded_policy(**fields):
    return HuggingFacePolicy(str(MODEL), max_total_sequence_length=24, precision="bfloat16", **fields)


def rounded_engine(**sampling):
    return HuggingFaceGeneration(str(MODEL), max_new_tokens=5, max_model_len=24, precision="bfloat16", **sampling)


def rounded_canary(calibration=None, sides="bfloat16"):
    return make_canary(
        WORDS, num_receivers=1, max_length=24, exact=False, calibration=calibration or CanaryCalibration(), sides=sides
    )


def one_optimizer_step(policy, lr_seed=0):
    ids = torch.randint(2, 18, (8, 16), generator=torch.Generator().manual_seed(lr_seed))
    rows = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((8,), 16),
            "token_mask": torch.ones(8, 16),
            "sample_mask": torch.ones(8),
        }
    )
    policy.prepare_for_training()
    policy.train(rows, NLLLossFn())
    policy.finish_training()


@pytest.fixture
def no_least_tolerance(monkeypatch):
    """The tolerance is a multiple of the first error even on processors with a tiny error in bfloat16."""
    monkeypatch.setattr(canary_module, "LEAST_TOLERANCE", 0.0)


def test_a_tiny_first_error_allows_the_least_tolerance_and_a_larger_one_a_multiple_of_itself():
    assert CanaryCalibration(error=LEAST_TOLERANCE / 10).tolerance("") == LEAST_TOLERANCE
    assert CanaryCalibration(error=LEAST_TOLERANCE).tolerance("") == MARGIN * LEAST_TOLERANCE


@pytest.mark.usefixtures("no_least_tolerance")
def test_in_bfloat16_an_engine_one_optimizer_step_behind_is_rejected_and_a_refitted_one_is_accepted():
    policy, engine = rounded_policy(optimizer={"kwargs": {"lr": 1.0e-5}}), rounded_engine()
    calibration = CanaryCalibration()
    canary = rounded_canary(calibration)
    first = canary.check(policy, engine)
    assert 0 < first < FIRST_TOLERANCE
    assert calibration.error == first
    assert canary.check(policy, engine) <= MARGIN * first
    one_optimizer_step(policy)
    with pytest.raises(WeightSyncError, match=r"1\.5 times the error of the first sync"):
        canary.check(policy, engine)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport), canary=RefitCanary(lambda: canary))
    assert sync.sync()["refit/canary_error"] <= MARGIN * first
    sync.close()


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"repetition_penalty": 1.3}])
def test_in_bfloat16_an_engine_that_samples_from_another_distribution_is_rejected_at_the_first_sync(sampling):
    with pytest.raises(WeightSyncError, match="at the first sync"):
        rounded_canary().check(rounded_policy(), rounded_engine(**sampling))


@pytest.mark.usefixtures("no_least_tolerance")
def test_a_resumed_run_is_compared_with_the_first_canary_error_of_the_original_run(caplog):
    policy, engine = rounded_policy(optimizer={"kwargs": {"lr": 1.0e-5}}), rounded_engine()
    before = CanaryCalibration()
    rounded_canary(before).check(policy, engine)
    one_optimizer_step(policy)
    resumed = CanaryCalibration()
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    with pytest.raises(WeightSyncError, match="the error of the first sync"):
        rounded_canary(resumed).check(policy, engine)
    # Other arithmetic has another error, which is measured again and reported.
    assert rounded_canary(resumed, sides="float16").check(policy, engine) == resumed.error != before.error
    assert "measured again, because the run now has float16" in caplog.text


def test_a_policy_that_scores_at_another_temperature_than_its_engine_is_compared_at_the_engines():
    policy = HuggingFacePolicy(str(MODEL), max_total_sequence_length=24)
    engine = HuggingFaceGeneration(str(MODEL), max_new_tokens=5, max_model_len=24, temperature=0.5)
    options = {"num_receivers": 1, "max_length": 24, "exact": True}
    with pytest.raises(WeightSyncError):
        make_canary(WORDS, **options).check(policy, engine)
    temperature_correction = TemperatureCorrection(factor=1.0 / 0.5, vocab_size=policy.facts["vocab_size"])
    assert make_canary(WORDS, **options, temperature_correction=temperature_correction).check(policy, engine) < 1e-5


def test_the_canary_runs_once_per_worker_or_in_every_sync_if_digests_are_of_received_weights(sides, monkeypatch):
    def sync_of(**options):
        return WeightSynchronizer(
            *sides,
            WeightSender(sides[0], SharedMemoryTransport, **options),
            canary=RefitCanary(lambda: make_canary(WORDS, num_receivers=1, max_length=16, exact=True)),
        )

    held, arrived = sync_of(), sync_of(digests_are_held=False)
    assert held.sync()["refit/canary_error"] < 1e-5
    assert "refit/canary_error" not in held.sync(only_if_stale=True)
    assert "refit/canary_error" not in held.sync(), "fingerprints cover what this engine computes with"
    monkeypatch.setattr(type(sides[1]), "restarts", 1)
    assert held.sync()["refit/canary_error"] < 1e-5
    assert "refit/canary_error" not in held.sync()
    assert arrived.sync()["refit/canary_error"] < 1e-5
    found = arrived.sync(only_if_stale=True)
    assert found["refit/moved"] == 0.0
    assert found["refit/canary_error"] < 1e-5
    # Digests of what arrived still agree when the tensors that the engine computes with have changed.
    worker = sides[1].group.worker
    worker.named_weights()["model.layers.0.mlp.down_proj.weight"].data.mul_(1.02)
    monkeypatch.setattr(arrived.sender, "already_equal", lambda engine, seconds: True)
    with pytest.raises(WeightSyncError, match="log-probabilities that differ from the policy's"):
        arrived.sync(only_if_stale=True)
    held.sync()
