"""An engine with its own weights is refused for training on samples of the policy, and only for that."""

import sys

import pytest

from rl_train.config.loader import load_config
from rl_train.config.rules.rollouts import imported_engine_samples_from_the_policy
from rl_train.config.rules.rule import CheckedConfig, Use

REASON = (
    "policy.generation.backend: the engine '{engine}' has its own weights, which are never those of the policy, so grpo "
    "would train on samples of another model. Choose an engine that receives the policy's weights; this one can be used by "
    "`rlcore eval`."
)
ENGINES = """
class Judge:
    has_own_weights = True

class OtherJudge(Judge):
    pass
"""


@pytest.fixture
def judges(tmp_path, monkeypatch):
    """A module on the path that no test has imported."""
    (tmp_path / "judges_with_weights.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "judges_with_weights"
    sys.modules.pop("judges_with_weights", None)


def engine(good, backend):
    return good.replace("    backend: hf\n    max_new", f"    backend: {backend}\n    max_new")


def test_training_on_an_engine_with_its_own_weights_is_refused_and_an_evaluation_is_not(files, good, registry):
    text = engine(good, "remote")
    assert files.errors(text) == ["config.yaml:7:14: " + REASON.format(engine="remote")]
    assert load_config(files.write(text), registry=registry, use=Use.EVAL).run.policy.generation.has_own_weights


def test_a_backend_declares_its_own_weights_depending_on_its_keys(files, good):
    [error] = files.errors(engine(good, "remote").replace("tokens: 64", "tokens: 64\n    refits: true"))
    assert "has its own weights" not in error
    assert "cannot receive the weights of the policy backend" in error


def test_an_engine_given_by_its_path_declares_its_own_weights_on_its_class(files, good, judges, registry):
    assert files.errors(engine(good, f"{judges}.Judge")) == ["config.yaml:7:14: " + REASON.format(engine=f"{judges}.Judge")]
    assert judges not in sys.modules
    inherited = load_config(files.write(engine(good, f"{judges}.OtherJudge")), registry=registry)
    [problem] = imported_engine_samples_from_the_policy.problems(CheckedConfig(run=inherited.run, registry=registry))
    assert "OtherJudge' has its own weights" in problem.message
    assert problem.path == ("policy", "generation", "backend")
