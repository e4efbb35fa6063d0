"""The conformance kit finds every wrong plugin, by the test of the promise that it breaks and no other."""

import re
from importlib import import_module
from pathlib import Path
from typing import Literal
from unittest import SkipTest

import pytest
from isolation import require_isolation
from ray import cloudpickle
from wrong_plugins.loggers import Lines, written
from wrong_plugins.registry import (
    ALGORITHMS,
    COMMANDS,
    DATASETS,
    ENGINES,
    ENVIRONMENTS,
    LOGGERS,
    LOSSES,
    POLICIES,
    SANDBOXES,
    TRANSPORTS,
)

from rl_core.config.schema import PolicyConfig
from rl_core.environments import StepResult, environment_return
from rl_core.interfaces import EnvironmentInterface
from rl_core.testing import (
    CommandConformance,
    EnvironmentConformance,
    GenerationConformance,
    LossConformance,
    PolicyConformance,
    SandboxConformance,
    WeightTransportConformance,
)
from rl_core.testing.promises import Status
from rl_core.testing.pytest_plugin import results_of
from rl_train.testing import AlgorithmConformance, DatasetConformance, LoggerConformance

ROWS = [{"prompt": f"{number}+2=", "expected_answer": str(number + 2)} for number in range(4)]


def broken(base, component, **attributes):
    """The tests of broken promises, and the errors that they show."""
    tests = type("Tests", (base,), {"component": component, **attributes})
    results = [result for result in results_of(tests) if result.status is Status.BROKEN]
    return [result.promise.name for result in results], "\n".join(map(tests.failure_text, results))


class Float32Only(PolicyConfig):
    precision: Literal["float32"] = "float32"


def test_a_promise_that_a_section_rules_out_names_the_refused_value_alone(monkeypatch):
    monkeypatch.setattr(PolicyConformance, "_settings", {"max_grad_norm": None, "precision": "bfloat16"})
    section = Float32Only(backend="acme", model_name="model")
    with pytest.raises(SkipTest, match=r"^its section does not accept `precision: bfloat16` of this test$"):
        PolicyConformance.with_settings(section)


class TwoMoves(EnvironmentInterface):
    """Left, then right; the reward of the last move is a text."""

    def step(self, message_log_batch, metadata):
        rows = zip([log[-1]["content"] for log in message_log_batch], metadata, strict=True)
        return environment_return([self._turn(text, info, info.get("moved", False)) for text, info in rows])

    def _turn(self, text, info, has_moved):
        reward, reply = "won" if has_moved and text == "right" else 0.0, {"role": "environment", "content": "Next move."}
        ended = has_moved or text != "left"
        return StepResult(observation=reply, metadata={**info, "moved": True}, rewards={"reward": reward}, terminated=ended)


def test_the_answers_of_a_test_class_are_sent_in_turn():
    attributes = {"rows": ROWS, "config": {"max_rollout_turns": 3}}
    assert broken(EnvironmentConformance, f"{__name__}.TwoMoves", **attributes) == ([], "")
    assert broken(EnvironmentConformance, f"{__name__}.TwoMoves", **attributes, answers=["left", "left"]) == ([], "")
    names, text = broken(EnvironmentConformance, f"{__name__}.TwoMoves", **attributes, answers=["left", "right", "up"])
    assert names == ["test_step_returns_one_valid_entry_per_row"]
    assert "row 0 has 'won'. Return a number for each row" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Right", *ENVIRONMENTS])
def test_the_kit_finds_a_wrong_environment_by_the_promise_that_it_breaks(name):
    path = f"wrong_plugins.environments.{name}"
    names, text = broken(EnvironmentConformance, path, rows=ROWS)
    assert names == ([] if name == "Right" else [ENVIRONMENTS[name].promise]), text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.promise])
def test_the_kit_finds_a_wrong_engine_by_the_promise_that_it_breaks(name):
    names, text = broken(GenerationConformance, f"wrong_plugins.engines.{name}")
    # Most of these engines differ in `generate` only, so `generate_async`, which is right, differs from it.
    expected, with_it = ENGINES[name].promise, "test_generate_async_equals_generate"
    assert [each for each in names if each != with_it or expected == with_it] == [expected], text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["Right", *TRANSPORTS])
def test_the_kit_finds_a_wrong_weight_transport_by_the_promise_that_it_breaks(name):
    names, text = broken(WeightTransportConformance, f"wrong_plugins.transports.{name}")
    assert names == ([] if name == "Right" else [TRANSPORTS[name].promise]), text
    assert "Traceback" not in text


SLOW = pytest.mark.full("every call starts an interpreter; another sandbox here, and tests/sandbox, run in CI")


@pytest.mark.parametrize(
    "name", ["JoinsBothOutputs", *(pytest.param(name, marks=SLOW) for name in SANDBOXES if name != "JoinsBothOutputs")]
)
def test_the_kit_finds_a_wrong_sandbox_by_the_promise_that_it_breaks(name):
    require_isolation()
    names, text = broken(SandboxConformance, f"wrong_plugins.sandboxes.{name}")
    assert names == [SANDBOXES[name].promise], text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right", *COMMANDS])
def test_the_kit_finds_a_wrong_command_by_the_promise_that_it_breaks(name):
    path = f"wrong_plugins.commands.{name}.command"
    names, text = broken(CommandConformance, path, arguments=() if name == "ignores_unknown_options" else (__file__,))
    assert names == ([] if name == "right" else [COMMANDS[name].promise]), text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["Right", *LOGGERS])
def test_the_kit_finds_a_wrong_logger_by_the_promise_that_it_breaks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"wrong_plugins.loggers.{name}"
    names, text = broken(LoggerConformance, path, written=classmethod(lambda _, folder: written(folder)))
    assert names == ([] if name == "Right" else [LOGGERS[name].promise]), text
    assert "Traceback" not in text


def test_the_kit_says_of_a_constructor_of_a_logger_what_a_run_says(tmp_path, monkeypatch):
    (tmp_path / "logger_of_cfg.py").write_text(
        "from wrong_plugins.loggers import Lines\n\nclass Logger(Lines):\n    def __init__(self, cfg): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _, text = broken(LoggerConformance, "logger_of_cfg.Logger")
    assert "Write `def __init__(self, *, config, folder)`. See docs/write_a_logger.md." in text


def test_the_kit_gives_a_logger_the_records_of_a_run():
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    table = page.partition("has these keys:")[2].partition("##")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    rows = []

    class Keeps(Lines):
        def log_rollouts(self, rollouts, step):
            rows.extend(rollouts)

    make = classmethod(lambda _, folder: Keeps(config=None, folder=folder))
    broken(LoggerConformance, "wrong_plugins.loggers.Right", make=make)
    assert rows
    assert all(row.keys() == keys for row in rows), keys ^ rows[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Right", *DATASETS])
def test_the_kit_finds_a_wrong_dataset_by_the_promise_that_it_breaks(name):
    bad_rows = {"row 3": {"bad": 3}} if name in ("Right", "StopsAtABadRow") else {}
    names, text = broken(DatasetConformance, f"wrong_plugins.datasets.{name}", bad_rows=bad_rows)
    assert names == ([] if name == "Right" else [DATASETS[name].promise]), text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["Right", *LOSSES])
def test_the_kit_finds_a_wrong_loss_by_the_promise_that_it_breaks(name):
    names, text = broken(LossConformance, f"wrong_plugins.losses.{name}")
    assert names == ([] if name == "Right" else [LOSSES[name].promise]), text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "right",
        "forgets_its_state",
        *(
            pytest.param(name, marks=pytest.mark.full("each trains four runs; two of these algorithms run in CI"))
            for name in ALGORITHMS
            if name != "forgets_its_state"
        ),
    ],
)
def test_the_kit_finds_a_wrong_algorithm_by_the_promise_that_it_breaks(name):
    path, settings = f"wrong_plugins.algorithms.{name}.train", "wrong_plugins.algorithms.settings.Settings"
    names, text = broken(AlgorithmConformance, path, settings=settings)
    assert names == ([] if name == "right" else [ALGORITHMS[name].promise]), text
    assert "Traceback" not in text


IN_TRAINING = pytest.mark.full("tests/train/training_checks finds this policy in a run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=IN_TRAINING if policy.marker == "train" else ())
        for name, policy in POLICIES.items()
        if policy.promise and policy.marker != "kit with ranks"
    ],
)
def test_the_kit_finds_a_wrong_policy_by_the_promise_that_it_breaks(name):
    names, text = broken(PolicyConformance, f"wrong_plugins.policies.{name}.Policy")
    assert names == [POLICIES[name].promise], text
    assert "Traceback" not in text


@pytest.mark.full("two workers start twice; a run over two ranks with other wrong policies is in tests/e2e")
@pytest.mark.ray
@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.marker == "kit with ranks"])
def test_the_kit_with_two_ranks_finds_a_wrong_policy_by_the_promise_that_it_breaks(name):
    path = f"wrong_plugins.policies.{name}.Policy"
    cloudpickle.register_pickle_by_value(import_module(path.rpartition(".")[0]))  # workers cannot import this folder
    assert broken(PolicyConformance, path)[0] == []
    names, text = broken(PolicyConformance, path, uses_ray=True)
    assert names == [POLICIES[name].promise], text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "interface"), [(PolicyConformance, "PolicyInterface"), (GenerationConformance, "GenerationInterface")]
)
def test_the_kit_names_a_class_without_the_interface_of_its_kind(base, interface):
    names, text = broken(base, "types.SimpleNamespace")
    assert names == ["test_it_is_created_from_its_section"], text
    assert f"SimpleNamespace is not a subclass of rl_core.interfaces.{interface}" in text
    assert "Traceback" not in text
