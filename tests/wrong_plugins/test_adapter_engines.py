"""Engines that compute wrongly with adapters are found by the conformance kit, and most of them by the canary of a run."""

import pytest
from wrong_plugins import adapter_engines

from rl_core.testing import GenerationConformance
from rl_core.testing.promises import Status
from rl_core.testing.pytest_plugin import results_of

FIRST, LATER, PAUSE, UNKNOWN = (
    "test_adapters_are_added_to_their_layers",
    "test_a_later_refit_brings_adapters_alone",
    "test_adapters_outlast_a_pause",
    "test_adapters_that_fit_no_layer_are_refused",
)
WRONG = {
    "LeavesOutTheScale": FIRST,
    "TransposesSquareMatrices": FIRST,
    "KeepsTheFirstAdapter": LATER,
    # Written after the checks.
    "SwapsTwoLayers": FIRST,
    "ForgetsAdaptersInAPause": PAUSE,
    "AdaptsOnlyPrompts": FIRST,
    "StreamsWithoutAdapters": LATER,
    "MergesEachRefit": LATER,
    "KeepsTheFirstScale": LATER,
    "RoundsAdapters": FIRST,
    "AcceptsAdaptersOfUnknownLayers": UNKNOWN,
}
STOPS = ["LeavesOutTheScale", "TransposesSquareMatrices", "KeepsTheFirstAdapter", "SwapsTwoLayers", "AdaptsOnlyPrompts"]


@pytest.mark.parametrize("name", ["Right", *(pytest.param(name, marks=pytest.mark.slow) for name in WRONG)])
def test_the_kit_finds_them_by_the_promise_that_they_break(name):
    tests = type("Tests", (GenerationConformance,), {"component": f"wrong_plugins.adapter_engines.{name}"})
    results = [result for result in results_of(tests) if result.status is Status.BROKEN]
    assert [result.promise.name for result in results] == ([WRONG[name]] if name in WRONG else [])


def test_each_of_them_is_tested():
    named = {name for name, each in vars(adapter_engines).items() if isinstance(each, type) and hasattr(each, "Worker")}
    assert named - {"EngineOf", "AdaptersOf", "Right"} == WRONG.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Right", *STOPS])
def test_the_canary_of_a_run_stops_them_once_adapters_have_grown(train, name):
    lora = {"hf_cfg": {"lora": {"rank": 192}}, "optimizer": {"kwargs": {"lr": 0.01}}}
    section = {"policy": {**lora, "generation": {"backend": f"wrong_plugins.adapter_engines.{name}", "lora": "adapter"}}}
    code, output, steps = train(section)
    assert (code == 0) == (name == "Right"), output
    assert name == "Right" or ("the generation backend computes log-probabilities that differ" in output and len(steps) < 3)
