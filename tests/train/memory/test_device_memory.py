"""What is offloaded at a refit: all if policy and engine take turns, nothing if both fit and no critic displaced the policy."""

import pytest

from rl_train.weight_sync.device_memory import DeviceMemory


class Recorder:
    """A model or an engine that records the calls of `DeviceMemory`: the test is about which are made."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __getattr__(self, method):
        return lambda: self.calls.append(f"{self.name}.{method}")


@pytest.fixture
def calls():
    return []


@pytest.fixture
def made(calls):
    def make(**devices):
        policy, critic, engine = (Recorder(name, calls) for name in ("policy", "critic", "engine"))
        return policy, critic, engine, DeviceMemory(policy, None, companions=(critic,), **devices)

    return make


def test_if_both_fit_the_policy_is_not_offloaded_at_a_refit(made, calls):
    policy, _, engine, memory = made(both_fit=True)
    memory.free_for_refit(engine)
    assert calls == ["critic.offload_after_refit", "policy.offload_before_refit"], "it has left before the critic loads"
    calls.clear()
    for _ in range(2):
        memory.free_for_refit(engine)
        memory.free_for_engine()
        assert calls == []
        memory.free_for_model(policy)
        assert calls == ["critic.offload_after_refit"]
        calls.clear()


def test_a_policy_that_a_critic_displaced_gets_its_weights_back_for_the_refit(made, calls):
    _, critic, engine, memory = made(both_fit=True)
    memory.free_for_model(critic)
    assert calls == ["policy.offload_after_refit"]
    calls.clear()
    memory.free_for_refit(engine)
    memory.free_for_engine()
    assert calls == ["critic.offload_after_refit", "policy.offload_before_refit"]
    calls.clear()
    memory.free_for_refit(engine)
    assert calls == []


def test_on_shared_devices_everything_but_the_sent_weights_is_offloaded(made, calls):
    _, _, engine, memory = made(limited=True)
    memory.free_for_refit(engine)
    assert calls == ["engine.finish_generation", "critic.offload_after_refit", "policy.offload_before_refit"]
    calls.clear()
    memory.free_for_engine()
    assert calls == ["policy.offload_after_refit", "critic.offload_after_refit"]
