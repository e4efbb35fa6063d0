"""Devices of the components of a run, and the start order of those that share a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from rl_core.config.schema import ClusterConfig
from rl_core.errors import ConfigError
from rl_train.assembly.placement import make_cluster
from rl_train.assembly.workers import Builder

SEES_A_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("use_gpus", [None, SEES_A_GPU])
def test_a_run_in_one_process_needs_no_cluster(use_gpus):
    assert make_cluster(ClusterConfig(backend="in_process", use_gpus=use_gpus), ExitStack()) is None


def test_a_run_in_one_process_refuses_a_device_that_the_process_does_not_compute_on():
    with pytest.raises(ConfigError, match="in_process"):
        make_cluster(ClusterConfig(backend="in_process", use_gpus=not SEES_A_GPU), ExitStack())


def sections(started, *, value):
    """The sections of a run, with a list of what was started."""
    policy = SimpleNamespace(generation=None)
    return SimpleNamespace(policy=policy, value=value, teacher=None, teachers={}, env={}, started=started)


class Recorded(Builder):
    """Records what would be started, without starting anything."""

    def note(self, what):
        self.run.started.append(what)
        return SimpleNamespace(
            finish_generation=lambda: self.run.started.append("the engine sleeps"),
            offload_after_refit=lambda: self.run.started.append(f"the {what} leaves"),
        )

    def policy(self):
        return self.note("policy")

    def companions(self):
        return {"critic": self.note("critic")}

    def generation(self):
        return self.note("engine")


def test_on_gpus_the_engine_has_measured_its_memory_and_sleeps_before_anything_else_loads():
    started = []
    builder = Recorded(
        run=sections(started, value=object()),
        registry=None,
        exits=ExitStack(),
        cluster=SimpleNamespace(use_gpus=True),
    )
    workers = builder.start(samples=True)
    assert started == ["engine", "the engine sleeps", "policy", "the policy leaves", "critic"]
    assert workers.generation is not None
    assert workers.companions.keys() == {"critic"}


def test_an_engine_with_its_own_gpus_does_not_sleep_while_the_policy_loads():
    class WithOwnResources(Recorded):
        engine_cluster = SimpleNamespace(use_gpus=True)

    started = []
    run = sections(started, value=None)
    WithOwnResources(run=run, registry=None, exits=ExitStack(), cluster=SimpleNamespace(use_gpus=True)).start(samples=True)
    assert started == ["policy", "engine", "critic"]


def test_on_gpus_a_run_that_samples_nothing_has_no_engine():
    started = []
    builder = Recorded(
        run=sections(started, value=object()),
        registry=None,
        exits=ExitStack(),
        cluster=SimpleNamespace(use_gpus=True),
    )
    assert builder.start(samples=False).generation is None
    assert "engine" not in started
