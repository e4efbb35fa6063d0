"""A refit of adapters: frozen weights are sent once, adapters in each refit, and an engine never samples without them."""

import pytest
import torch
from test_weight_sync import make_engine, make_policy
from tiny_refit_workers import AdaptedEngine, AdaptedPolicy, TinyEngine, context

from rl_core.errors import NotSupportedError, WeightSyncError
from rl_core.weights.adapters import adapter_ranks, adapters_in
from rl_core.weights.manifest import tensor_bytes
from rl_train.weight_sync.canary import RefitCanary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, DiskTransport, SharedMemoryTransport

ADAPTERS = {f"{layer}.{part}" for layer in "qk" for part in ("lora_A.weight", "lora_B.weight", "lora_scale")}


def sides(engine_class=AdaptedEngine, transport=SharedMemoryTransport, canary=None, **options):
    policy, engine = make_policy(AdaptedPolicy), make_engine(engine_class)
    sender = WeightSender(policy, transport, buffer_bytes=700, **options)
    return policy.group.worker, engine, WeightSynchronizer(policy, engine, sender, canary=canary)


def assert_equal(policy, engine):
    sent, held = policy.weights(), engine.group.worker.weights()
    assert sent.keys() == held.keys() > ADAPTERS
    assert [name for name in sent if not torch.equal(sent[name], held[name])] == []


@pytest.mark.parametrize("transport", [SharedMemoryTransport, DiskTransport, ByReferenceTransport])
def test_frozen_weights_are_sent_once_and_adapters_in_each_refit(transport, tmp_path):
    policy, engine, sync = sides(transport=transport, folder=tmp_path)
    sync.sync()
    everything = {*policy.weight_manifest()}
    adapters = adapters_in(policy.weight_manifest())
    for _ in range(3):
        policy.step()
        metrics = sync.sync()
        assert engine.weight_version == policy.version
        assert_equal(policy, engine)
    assert engine.group.worker.arrived == [everything, ADAPTERS, ADAPTERS, ADAPTERS]
    assert engine.group.worker.prepared == 1
    if transport is SharedMemoryTransport:  # each tensor begins at a multiple of 64 bytes
        expected = sum(-(-tensor_bytes(shape, dtype) // 64) * 64 for shape, dtype in adapters.values())
        assert metrics["refit/bytes"] == expected
    assert engine.weight_digests().keys() == ADAPTERS
    sync.close()


def test_a_sync_of_equal_adapters_sends_nothing_and_one_of_others_under_the_same_version_does():
    policy, engine, sync = sides()
    sync.sync()
    policy.step()
    sync.sync()
    assert sync.sync(only_if_stale=True)["refit/moved"] == 0.0
    policy.model.q.lora_scale.mul_(2)
    assert sync.sync(only_if_stale=True)["refit/moved"] == 1.0
    assert_equal(policy, engine)


def test_adapters_alone_are_refused_by_an_engine_without_the_frozen_weights():
    policy, engine = AdaptedPolicy(context()), AdaptedEngine(context())
    with pytest.raises(WeightSyncError, match="the frozen weights next to them have not arrived"):
        engine.prepare_refit_info(adapters_in(policy.weight_manifest()))


class FailsOnce(AdaptedEngine):
    """Fails in the second bucket of a refit."""

    def load_weights(self, tensors):
        if len(self.arrived) == self.fails_in and self.arrived[-1]:
            self.fails_in = 0
            raise WeightSyncError("the network is down")
        super().load_weights(tensors)

    fails_in = 0


@pytest.mark.parametrize("refit", [1, 2])
def test_after_a_failed_refit_all_weights_are_sent_again(refit):
    policy, engine, sync = sides(FailsOnce)
    engine.group.worker.fails_in = refit
    for number in (1, 2, 3):
        policy.step()
        if number == refit:
            with pytest.raises(WeightSyncError, match="the network is down"):
                sync.sync()
            assert engine.weight_version == -1
        sync.sync()
        assert_equal(policy, engine)
    sizes = [len(names) for names in engine.group.worker.arrived]
    everything = len(policy.weight_manifest())
    assert sizes[refit] == everything
    assert sizes.count(everything) == (1 if refit == 1 else 2)
    assert sizes[-1] == len(ADAPTERS)


def test_an_engine_that_discarded_its_weights_gets_all_of_them():
    policy, engine, sync = sides()
    sync.sync()
    policy.step()
    engine.group.worker._weight_version = -1
    sync.sync()
    assert [len(names) for names in engine.group.worker.arrived] == [len(policy.weight_manifest())] * 2


class SkipsTheScale(AdaptedEngine):
    def load_weights(self, tensors):
        super().load_weights({name: tensor for name, tensor in tensors.items() if not name.endswith("q.lora_scale")})


class TransposesSquares(AdaptedEngine):
    def load_weights(self, tensors):
        squares = {"k.lora_A.weight"} if self.get_weight_version() or len(self.arrived) > 1 else set()
        super().load_weights({name: tensor.T if name in squares else tensor for name, tensor in tensors.items()})


class SwapsLayers(AdaptedEngine):
    def load_weights(self, tensors):
        other = {"k.lora_A.weight": "k.lora_B.weight", "k.lora_B.weight": "k.lora_A.weight"}
        super().load_weights({other.get(name, name): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("engine_class", "name"), [(SkipsTheScale, "q.lora_scale"), (TransposesSquares, "k.lora_A"), (SwapsLayers, "k.lora_")]
)
def test_fingerprints_cover_adapters(engine_class, name):
    policy, _, sync = sides(engine_class)

    def steps():
        for _ in range(2):
            policy.model.q.lora_scale.mul_(3)
            policy.step()
            sync.sync()

    with pytest.raises(WeightSyncError, match=name):
        steps()


def test_an_adapter_that_fits_no_layer_is_named():
    policy, engine = AdaptedPolicy(context()), AdaptedEngine(context())
    manifest = policy.weight_manifest()
    engine.prepare_refit_info(manifest)
    other = {name.replace("q.lora", "value.lora"): form for name, form in manifest.items()}
    with pytest.raises(WeightSyncError, match=r"adapter of 'value'.*no linear layer"):
        engine.prepare_refit_info(other)
    (rank, size), dtype = manifest["q.lora_A.weight"]
    with pytest.raises(WeightSyncError, match=r"q.lora_A.weight: \[3, 9\] in the policy, \[3, 8\] in the engine"):
        engine.prepare_refit_info({**manifest, "q.lora_A.weight": ((rank, size + 1), dtype)})
    with pytest.raises(WeightSyncError, match=r"does not send 'q.lora_B.weight'"):
        adapter_ranks({name: form for name, form in manifest.items() if name != "q.lora_B.weight"})


def test_an_engine_without_adapters_says_what_to_set():
    policy, engine = AdaptedPolicy(context()), TinyEngine(context())
    with pytest.raises(NotSupportedError, match=r"policy.generation.lora to merged") as refused:
        engine.prepare_refit_info(policy.weight_manifest())
    assert refused.value.key == "policy.generation.lora"


class CountingCanary:
    calls = 0

    def check(self, policy, generation, *, thorough):
        self.calls += 1
        return 0.0


def test_the_canary_runs_again_while_adapters_grow():
    counting = CountingCanary()
    policy, _, sync = sides(canary=RefitCanary(lambda: counting))
    after = []
    for _ in range(10):
        before = counting.calls
        sync.sync()
        after.append(counting.calls - before)
        policy.step()
    assert after == [1, 1, 1, 0, 1, 0, 0, 0, 1, 0]
