"""Defaults for the threads of compute processes, unless the user's environment sets them."""

from __future__ import annotations

import os

import pytest
from command_line import rlcore

from rl_core.compute_variables import compute_variables


@pytest.fixture
def environment(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_threads_spin_for_a_limited_time_by_default(environment):
    found = compute_variables()
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(found["GOMP_SPINCOUNT"]) < 100_000
    environment.setenv("OMP_WAIT_POLICY", found["OMP_WAIT_POLICY"])
    environment.setenv("GOMP_SPINCOUNT", found["GOMP_SPINCOUNT"])
    assert compute_variables() == found  # what a command sets is passed to its workers


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "0"}])
def test_a_wait_policy_of_the_users_environment_is_kept_and_passed_to_workers(environment, own):
    for name, value in own.items():
        environment.setenv(name, value)
    assert compute_variables() == own


def test_every_command_sets_the_variables_before_it_imports_torch(environment):
    seen = {}
    environment.setattr("rlcore_cli.main.app", lambda **_: seen.update(os.environ))
    assert rlcore("eval").returncode == 0
    assert {name: seen[name] for name in compute_variables()} == compute_variables()
    assert "GOMP_SPINCOUNT" not in os.environ  # `rlcore` restores the environment of the tests
