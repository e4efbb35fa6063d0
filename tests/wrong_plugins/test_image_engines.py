"""Engines that sample rows with images wrongly are found by the checks of a run, and by the conformance kit."""

import sys
from contextlib import suppress
from pathlib import Path
from pydoc import locate

import pytest
import torch
from kit_pictures import QwenVL
from policy_cases import NLL
from wrong_plugins import image_engines
from wrong_plugins.picture_models import PicturePolicyOf
from wrong_plugins.registry import PICTURES

sys.path.append(str(Path(__file__).parents[1] / "backends_hf"))

import tiny_vlms

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WeightSyncError
from rl_core.testing import GenerationConformance, PolicyConformance
from rl_core.testing.promises import Status
from rl_train.logprob_agreement import TokenDifferences, sampled_tokens
from rl_train.training_checks.agreement import EXACT_MEAN
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

DISAGREE = (
    "ShowsThePictureOfAnotherRow",
    "SwapsThePicturesOfARow",
    "PlacesFeaturesOneTokenLater",
    "ForgetsThePositionsOfPictures",
    "EncodesPicturesWithTheFirstTower",
)
FINGERPRINT = ("KeepsTheFirstTower",)
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vlms.make("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def rows():
    """Rows of two prompts with one picture, and of one with two of the same size, twice each."""
    parts = [[tiny_vlms.words(1, 6), 0, tiny_vlms.words(2, 4)], [tiny_vlms.words(3, 6), 3, tiny_vlms.words(4, 4)]]
    parts.append([tiny_vlms.words(5, 4), 0, tiny_vlms.words(6, 2), 3, tiny_vlms.words(7, 3)])
    return tiny_vlms.batch([tiny_vlms.row("qwen2_5_vl", each) for each in parts for _ in range(2)])


def run(name, folder, tmp_path):
    """Mean differences of the log-probabilities of engine and policy in each of three steps, as a run compares them."""
    section = {"optimizer": {"kwargs": {"lr": 1e-2}}, "max_total_sequence_length": 128}
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=folder, **section))
    engine = getattr(image_engines, name)(config={"model_name": folder, "max_new_tokens": 12})
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport, folder=tmp_path))
    data, means = rows(), []
    prompts = {key: data[key] for key in ("input_ids", "input_lengths", "images")}
    try:
        for step in range(STEPS):
            sync.sync()
            seeds = torch.arange(data.size) + 100 * step
            output = engine.generate(BatchedDataDict(prompts, sample_seeds=seeds))
            columns = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
            scores = policy.get_logprobs(BatchedDataDict(columns, images=data["images"]))["logprobs"]
            where = sampled_tokens(output)
            means.append(TokenDifferences(output["output_ids"], scores, output["logprobs"], compared=where).mean)
            policy.train(data, NLL())
    finally:
        sync.close()
        engine.shutdown()
    return means


def test_the_right_engine_agrees_in_every_step(folder, tmp_path):
    assert max(run("Right", folder, tmp_path)) < 1e-5


@pytest.mark.parametrize("name", [DISAGREE[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DISAGREE[1:])])
def test_log_probabilities_that_differ_show_it_within_three_steps(folder, tmp_path, name):
    means = run(name, folder, tmp_path)
    assert max(means) > 10 * EXACT_MEAN
    if name == "EncodesPicturesWithTheFirstTower":
        assert means[0] < EXACT_MEAN


@pytest.mark.parametrize("name", FINGERPRINT)
def test_fingerprints_show_weights_that_were_not_replaced(folder, tmp_path, name):
    with pytest.raises(WeightSyncError, match="visual"):
        run(name, folder, tmp_path)


def test_each_of_them_is_tested():
    named = {name for name, each in vars(image_engines).items() if isinstance(each, type) and hasattr(each, "Worker")}
    assert named - {"EngineOf", "ImageEngineOf", "Right"} == {*DISAGREE, *FINGERPRINT}


WRONG = [f"image_engines.{name}" for name in ("Right", *DISAGREE, *FINGERPRINT)]
WRONG += [f"picture_models.{name}" for name in ("RightWithPictures", *PICTURES)]
QUICK = ("PlacesFeaturesOneTokenLater", "ShiftsPositionsAfterPictures")
"""Those that are tried in every run of the tests; the others are `slow`."""


def kit_of(component, **attributes):
    """The test class of an engine or a policy."""
    base = PolicyConformance if issubclass(locate(component), PicturePolicyOf) else GenerationConformance
    return type("Tests", (base,), {"component": component, **attributes})


@pytest.mark.parametrize(
    "path", [path if path.endswith(QUICK) else pytest.param(path, marks=pytest.mark.slow) for path in WRONG]
)
def test_the_conformance_kit_finds_them_by_the_promise_of_images(path):
    tests = kit_of(f"wrong_plugins.{path}", picture_model=QwenVL())
    [name] = [each.name for each in tests.promises() if each.name.endswith("with_their_images")]
    tests.setup_class()
    try:
        with suppress(pytest.fail.Exception):
            getattr(tests(), name)()
        is_right = path.rpartition(".")[2].startswith("Right")
        assert (tests.results[name].status is Status.KEPT) == is_right, tests.results[name]
    finally:
        tests.teardown_class()


def test_without_a_model_that_reads_images_the_kit_says_that_the_promise_was_not_checked():
    tests = kit_of("wrong_plugins.image_engines.Right")
    tests.setup_class()
    with pytest.raises(pytest.skip.Exception, match="`picture_model` of the test class is not set"):
        tests().test_rows_are_sampled_with_their_images()
    tests.teardown_class()
