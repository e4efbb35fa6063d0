"""What a backend declares is compared with what its code shows, when a run creates it."""

import pytest

from rl_backends_base import DistributedGeneration, DistributedPolicy
from rl_core.backend import GenerationWorker, PolicyWorker
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import ConfigError
from rl_core.plugins.component import Capability, Component, Kind
from rl_train.assembly.contracts import capabilities_of, check_capabilities


class Engine(GenerationWorker):
    """Samples complete batches and receives no weights."""

    def __init__(self, context, config):
        pass

    def setup(self):
        return {"device": "cpu", "vocab_size": 8, "max_model_len": 8}

    def generate(self, data, *, greedy=False):
        raise NotImplementedError

    def get_weight_version(self):
        return 0

    def invalidate_kv_cache(self):
        return True


class StreamingEngine(Engine):
    def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
        return {}


class Policy(PolicyWorker):
    """Trains and scores; no top-k log-probabilities, no values, no weights for engines."""

    def __init__(self, context, config):
        pass

    def setup(self):
        return {"device": "cpu", "vocab_size": 8, "num_parameters": 1}

    def get_logprobs(self, data, *, reference=False):
        raise NotImplementedError

    def train(self, data, loss_fn, *, counts, eval_mode=False, mbs=None):
        raise NotImplementedError

    def prepare_for_training(self):
        pass

    def finish_training(self):
        pass

    def save_checkpoint(self, weights_path, optimizer_path):
        pass

    def load_checkpoint(self, weights_path, optimizer_path):
        pass

    def get_weight_version(self):
        return 0


def engine_of(worker_class):
    return DistributedGeneration(worker_class=worker_class, config=GenerationConfig(backend="acme", model_name="m"))


def policy():
    return DistributedPolicy(worker_class=Policy, config=PolicyConfig(backend="acme", model_name="m"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "method"),
    [
        (Capability.ASYNC_ROWS, "poll"),
        (Capability.SHARED_MEMORY, "update_weights"),
        (Capability.DISK, "update_weights"),
        (Capability.COLLECTIVE, "update_weights_from_collective"),
    ],
)
def test_an_engine_that_does_not_implement_what_it_declares_is_refused(capability, method):
    with pytest.raises(ConfigError) as raised:
        check_capabilities(engine_of(Engine), Kind.GENERATION, ["top_p", str(capability)])
    assert f"declares the capability {str(capability)!r}, but" in str(raised.value)
    assert f"does not implement `{method}`." in str(raised.value)


def test_an_engine_that_implements_poll_may_declare_rows_that_join_and_leave():
    check_capabilities(engine_of(StreamingEngine), Kind.GENERATION, ["async_rows", "top_p", "acme:own"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "method"),
    [
        (Capability.TOPK_LOGPROBS, "get_topk_logprobs"),
        (Capability.SCALAR_HEAD, "get_values"),
        (Capability.COLLECTIVE, "broadcast_weights_for_collective"),
        (Capability.SHARED_MEMORY, "get_weights_ipc_handles"),
    ],
)
def test_a_policy_that_does_not_implement_what_it_declares_is_refused(capability, method):
    with pytest.raises(ConfigError, match=f"does not implement `{method}`"):
        check_capabilities(policy(), Kind.POLICY, [capability])


def test_several_ranks_of_a_policy_that_does_not_declare_them_are_refused(monkeypatch):
    started = policy()
    monkeypatch.setattr(InProcessWorkerGroup, "world_size", 2)
    with pytest.raises(ConfigError, match="has 2 ranks, but does not declare the capability 'multiple_ranks'"):
        check_capabilities(started, Kind.POLICY, [])
    check_capabilities(started, Kind.POLICY, ["multiple_ranks"])


def test_a_misspelt_capability_of_a_class_given_by_its_path_is_refused(tmp_path, monkeypatch):
    (tmp_path / "acme_by_path.py").write_text("class Engine:\n    capabilities = ('async_row',)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no capability 'async_row'\. Did you mean 'async_rows'"):
        capabilities_of(Component.from_path("acme_by_path.Engine"))
