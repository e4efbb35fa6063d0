"""A task with an agent: its key selects the environment, and mistakes are reported at it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_train.config.rules.rollouts import agent_can_be_imported
from rl_train.config.rules.rule import CheckedConfig
from rl_train.rewards.config import AgentEnvironmentConfig, FunctionEnvironmentConfig

AGENT = "examples.agents.adder:add"


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


@pytest.mark.slow
def test_the_key_selects_an_environment_without_steps_and_many_turns(files, good):
    run = files.load(good.replace("arithmetic: {}", f"sums: {{agent: {AGENT}}}")).run
    assert isinstance(run.env["sums"], AgentEnvironmentConfig)
    assert run.max_turns == {"sums": 100}


def test_an_environment_may_score_what_an_agent_did(files, good):
    text = good.replace("arithmetic: {}", f"sums: {{agent: {AGENT}, reward_fn: json.loads, max_rollout_turns: 3}}")
    run = files.load(text).run
    assert isinstance(run.env["sums"], FunctionEnvironmentConfig)
    assert run.max_turns == {"sums": 3}


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ("{agent: add}", "env.sums.agent: 'add' is not the dotted path of a function"),
        ("{agent: examples.agents.adder:subtract}", "env.sums.agent: cannot import 'examples.agents.adder:subtract'"),
        ("{name: arithmetic, agent_timeout_s: 5}", "agent_timeout_s has no effect without `agent`: remove it"),
        ("{name: agent}", "environment `agent` does not score anything: set `agent`"),
    ],
)
def test_mistakes_are_reported_at_their_keys(files, good, section, where):
    [error] = files.errors(good.replace("arithmetic: {}", f"sums: {section}"))
    assert where in error


def test_losses_over_sequences_are_refused(files, good):
    text = good.replace("arithmetic: {}", f"sums: {{agent: {AGENT}}}") + "loss_fn: {name: gspo}\n"
    [error] = files.errors(text)
    assert "loss_fn.token_level_loss: an agent can divide a rollout into several segments" in error


def test_without_a_plugin_with_an_endpoint_the_error_names_one(files, good):
    run = files.load(good.replace("arithmetic: {}", f"sums: {{agent: {AGENT}}}")).run
    config = CheckedConfig(run=run, registry=SimpleNamespace(names=lambda kind: []))
    [problem] = agent_can_be_imported.problems(config)
    assert (problem.path, "rl-serve provides: install it" in problem.message) == (("env", "sums", "agent"), True)
