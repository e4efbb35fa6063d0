"""A refit through the facades in one process: transferred weights, verification, and rejected refits."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from tiny_refit_workers import (
    ForgetfulEngine,
    HalfPrecisionEngine,
    PolicyThatBreaks,
    PolicyThatLoses,
    PolicyThatRepeats,
    SlowEngine,
    TinyEngine,
    TinyPolicy,
)

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import (
    BrokenPromiseError,
    DeadlineExceededError,
    MissingCapabilityError,
    NotSupportedError,
    TransportDeclinedError,
    WeightSyncError,
)
from rl_core.weights.receiver import RefitProgress
from rl_core.weights.shared_memory import DIRECTORY
from rl_train.weight_sync import transports as transports_module
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import (
    ByReferenceTransport,
    CollectiveTransport,
    DiskTransport,
    SharedMemoryTransport,
    free_loopback_port,
    usable_transports,
)

ALL = [ByReferenceTransport, SharedMemoryTransport, CollectiveTransport, DiskTransport]
NAMES = [transport.name for transport in ALL]
SMALL_BUCKETS = 700
"""Bytes: the tiny model travels in several buckets, one of them a tensor that is larger than the budget."""


def make_policy(worker_class=TinyPolicy, face=DistributedPolicy):
    policy = face(worker_class=worker_class, config=PolicyConfig(backend="tiny", model_name="tiny"))
    policy.group.run_all("step")
    return policy


def make_engine(worker_class=TinyEngine, face=DistributedGeneration):
    return face(worker_class=worker_class, config=GenerationConfig(backend="tiny"))


def synchronizer(policy, engine, transport="shared_memory", transports=ALL, **options):
    first, *others = usable_transports(transports, policy_supports=NAMES, generation_supports=NAMES, name=transport)
    sender = WeightSender(policy, first, **{"buffer_bytes": SMALL_BUCKETS, "others": others, **options})
    return WeightSynchronizer(policy, engine, sender)


def weights_equal(policy, engine) -> bool:
    sent, held = policy.group.run_one("weights"), engine.group.run_one("weights")
    return sent.keys() == held.keys() and all(
        torch.equal(tensor.to(held[name].dtype), held[name]) for name, tensor in sent.items()
    )


@pytest.mark.parametrize("transport", ["shared_memory", "by_reference", "disk"])
def test_after_a_sync_the_engine_computes_with_the_policys_weights(transport):
    policy, engine = make_policy(), make_engine()
    sync = synchronizer(policy, engine, transport)
    assert sync.is_stale
    metrics = sync.sync()
    assert weights_equal(policy, engine)
    assert not sync.is_stale
    assert engine.weight_version == policy.weight_version == metrics["refit/weight_version"] == 1
    assert engine.group.worker.changes == 1
    assert (metrics["refit/bytes"] > 0) == (transport != "by_reference")


def test_two_buckets_in_transit_fit_the_buffer(monkeypatch):
    policy, sizes = make_policy(), []
    prepare = policy.prepare_weights_for_ipc
    monkeypatch.setattr(policy, "prepare_weights_for_ipc", lambda size, **given: sizes.append(size) or prepare(size, **given))
    synchronizer(policy, make_engine()).sync()
    assert sizes == [SMALL_BUCKETS // 2]


def test_every_step_needs_a_new_sync():
    policy, engine = make_policy(), make_engine()
    sync = synchronizer(policy, engine)
    for version in range(1, 4):
        sync.sync()
        assert weights_equal(policy, engine)
        assert engine.weight_version == version
        policy.group.run_all("step")
        assert sync.is_stale


def test_from_the_second_refit_on_the_policy_digests_while_the_engine_loads():
    loading, digesting = threading.Event(), threading.Event()

    class LoadsUntilItIsDigested(TinyEngine):
        def load_weights(self, tensors):
            loading.set()
            digesting.wait(30.0)
            super().load_weights(tensors)
            loading.clear()

    policy, engine = make_policy(), make_engine(LoadsUntilItIsDigested)
    sync = synchronizer(policy, engine, buffer_bytes=2**20)
    fingerprint, beside = policy.weight_fingerprint, []

    def watched(**options):
        # The first refit has to know the engine's kind of digest, so it digests after the loading.
        beside.append(loading.wait(30.0) if beside else loading.is_set())
        digesting.set()
        return fingerprint(**options)

    policy.weight_fingerprint = watched
    digesting.set()
    for _ in range(3):
        sync.sync()
        digesting.clear()
        assert weights_equal(policy, engine)
        policy.group.run_all("step")
    assert beside == [False, True, True]


def test_a_tensor_that_the_engine_skips_in_a_later_refit_stops_the_run(monkeypatch):
    policy, engine = make_policy(), make_engine()
    sync = synchronizer(policy, engine)
    sync.sync()
    policy.group.run_all("step")
    monkeypatch.setattr(TinyEngine, "load_weights", ForgetfulEngine.load_weights)
    with pytest.raises(WeightSyncError, match=r"k\.weight"):
        sync.sync()


def test_weights_are_cast_to_the_engines_precision_and_verified_in_it():
    policy, engine = make_policy(), make_engine(HalfPrecisionEngine)
    metrics = synchronizer(policy, engine).sync()
    assert weights_equal(policy, engine)
    assert engine.group.worker.model.q.weight.dtype == torch.bfloat16
    in_full = synchronizer(policy, make_engine()).sync()
    assert metrics["refit/bytes"] < 0.6 * in_full["refit/bytes"]  # each tensor begins at a multiple of 64 bytes


def test_a_tensor_with_an_unexpected_dtype_is_rejected():
    ledger = RefitProgress({"a": ((2,), "float32")}, {"a": "bfloat16"})
    ledger.admit("one", 1, {"a": ((2,), "bfloat16")})
    ledger.admit("one", 1, {"a": ((2,), "float32")})
    with pytest.raises(WeightSyncError, match=r"'a' arrived as float16 \[2\], but the manifest says float32 \[2\]"):
        ledger.admit("one", 1, {"a": ((2,), "float16")})


def test_no_reference_to_the_shared_buffer_is_kept():
    policy, engine = make_policy(), make_engine()
    synchronizer(policy, engine).sync()
    before = engine.weight_fingerprint()
    policy.group.run_all("step")
    assert engine.weight_fingerprint() == before


def test_by_reference_both_sides_share_memory():
    policy, engine = make_policy(), make_engine()
    synchronizer(policy, engine, "by_reference").sync()
    sent, held = policy.group.worker.model, engine.group.worker.model
    assert sent.q.weight.data_ptr() == held.q.weight.data_ptr()
    assert sent.running.data_ptr() == held.running.data_ptr()
    assert held.head.weight is held.embed.weight


def test_later_refits_over_shared_memory_reuse_its_segments():
    policy, engine = make_policy(), make_engine()
    sync, names = synchronizer(policy, engine), []
    update = engine.update_weights
    engine.update_weights = lambda handles: (names.append(handles["segment"]), update(handles))
    for _ in range(3):
        sync.sync()
        assert weights_equal(policy, engine)
        policy.group.run_all("step")
    count = len(names) // 3
    assert count > 2
    # In the first refit a segment may be replaced by a larger one.
    assert names[count : 2 * count] == names[2 * count :]
    assert len(set(names[count:])) == 2
    policy.shutdown()
    assert not any((DIRECTORY / name).exists() for name in names)


def test_by_reference_compares_fingerprints_once_and_addresses_in_each_refit(monkeypatch):
    policy, engine = make_policy(), make_engine()
    sync, worker = synchronizer(policy, engine, "by_reference"), engine.group.worker
    digests, digest = [], engine.weight_fingerprint
    monkeypatch.setattr(engine, "weight_fingerprint", lambda: digests.append(1) or digest())
    for version in (1, 2, 3):
        assert sync.sync()["refit/weight_version"] == engine.weight_version == version
        assert worker.model.q.weight.data_ptr() == policy.group.worker.model.q.weight.data_ptr()
        worker.refuse_changed_weights()
        policy.group.run_all("step")
        with pytest.raises(WeightSyncError, match=r"changed \d+ weights since the last weight sync.*newer than version"):
            worker.refuse_changed_weights()
    assert len(digests) == 1
    monkeypatch.setattr(worker, "named_weights", worker.weights)  # copies
    with pytest.raises(WeightSyncError, match="does not alias the policy's"):
        sync.sync()


def test_by_reference_needs_one_precision():
    with pytest.raises(NotSupportedError, match=r"(?s)float32 on cpu in the policy.*shared_memory"):
        synchronizer(make_policy(), make_engine(HalfPrecisionEngine), "by_reference").sync()


def test_equal_weights_skip_the_sync_only_if_requested():
    policy, engine = make_policy(), make_engine()
    sync = synchronizer(policy, engine)
    assert sync.sync(only_if_stale=True)["refit/moved"] == 1.0
    assert sync.sync(only_if_stale=True)["refit/moved"] == 0.0
    assert sync.sync()["refit/moved"] == 1.0
    assert engine.group.worker.changes == 2


def test_equal_versions_of_unequal_weights_are_synced_again():
    policy, engine = make_policy(), make_engine()
    sync = synchronizer(policy, engine)
    sync.sync()
    engine.group.worker.model.q.weight.data[0, 0] += 1
    assert sync.sync(only_if_stale=True)["refit/moved"] == 1.0
    assert weights_equal(policy, engine)


def corrupt_segment(handles, change) -> None:
    """Change the bytes of a bucket in shared memory during the transfer."""
    path = DIRECTORY / handles["segment"]
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    change({name: place.view(content) for name, place in handles["placements"].items()})
    path.write_bytes(bytes(content.numpy()))


def transposed(handles):
    corrupt_segment(handles, lambda tensors: tensors["q.weight"].copy_(tensors["q.weight"].T.clone()))
    return [handles]


def one_bit_flipped(handles):
    def flip(tensors):
        tensors["q.weight"].view(torch.int32)[0, 0] ^= 1

    corrupt_segment(handles, flip)
    return [handles]


def swapped(handles):
    places = dict(handles["placements"])
    places["q.weight"], places["k.weight"] = places["k.weight"], places["q.weight"]
    return [{**handles, "placements": places}]


def lost(handles):
    return [{**handles, "placements": {n: p for n, p in handles["placements"].items() if n != "q.weight"}}]


def sent_twice(handles):
    return [handles, handles]


def renamed(handles):
    places = dict(handles["placements"])
    places["q.wieght"] = places.pop("q.weight")
    return [{**handles, "placements": places}]


def reshaped(handles):
    places = dict(handles["placements"])
    places["q.weight"] = replace(places["q.weight"], shape=(4, 16))
    return [{**handles, "placements": places}]


def stated_as_the_version_before(handles):
    return [{**handles, "weight_version": handles["weight_version"] - 1}]


class Tampering(DistributedGeneration):
    """Changes a bucket between policy and engine."""

    fault = None

    def update_weights(self, ipc_handles):
        affected = self.fault is not None and "q.weight" in ipc_handles["placements"]
        for handles in self.fault(ipc_handles) if affected else [ipc_handles]:
            super().update_weights(handles)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lost, r"1 of 8 weights have not arrived.*q\.weight"),
        (transposed, r"(?s)differ.*q\.weight: float32\[8,8\]"),
        (one_bit_flipped, r"(?s)differ.*q\.weight: float32\[8,8\]"),
        (swapped, r"(?s)k\.weight: .*which is the policy's q\.weight.*q\.weight: .*which is the policy's k\.weight"),
        (sent_twice, r"'q\.weight' arrived twice"),
        (renamed, r"'q\.wieght' is not in the manifest"),
        (reshaped, r"'q\.weight' arrived as float32 \[4, 16\], but the manifest says float32 \[8, 8\]"),
    ],
)
def test_a_transfer_error_stops_the_run_and_names_the_tensor(fault, said):
    policy, engine = make_policy(), make_engine(face=Tampering)
    # One bucket, so that the swapped pair is in it.
    sync = synchronizer(policy, engine, buffer_bytes=1 << 20)
    sync.sync()
    policy.group.run_all("step")
    engine.fault = fault
    with pytest.raises(WeightSyncError, match=said):
        sync.sync()
    engine.fault = None
    sync.sync()
    assert weights_equal(policy, engine)


def test_a_bucket_of_the_version_before_stops_the_run_and_names_its_tensors():
    policy, engine = make_policy(), make_engine(face=Tampering)
    engine.fault = stated_as_the_version_before
    with pytest.raises(WeightSyncError, match=r"q\.weight.* arrived as version 0 in a refit to version 1"):
        synchronizer(policy, engine).sync()


class SendsNothing(DiskTransport):
    name = "acme"
    returned = 0

    def push(self, policy, generation):
        return self.returned


def test_a_push_that_returns_no_number_names_the_transport_and_what_it_must_return():
    class SendsAll(SendsNothing):
        def push(self, policy, generation):
            DiskTransport.push(self, policy, generation)

    sync = synchronizer(make_policy(), make_engine(), "acme", transports=[SendsAll])
    with pytest.raises(BrokenPromiseError, match=r"SendsAll .* returned None\. It must return the number of bytes"):
        sync.sync()


def test_a_transport_that_sends_nothing_is_named_with_the_tensors():
    sync = synchronizer(policy := make_policy(), engine := make_engine(), "acme", transports=[SendsNothing])
    missing = r"no weights arrived\..*SendsNothing .* all 8 tensors in every refit \(.*q\.weight.* and 3 more\)"
    with pytest.raises(WeightSyncError, match=missing):
        sync.sync()
    synchronizer(policy, engine).sync()
    policy.group.run_all("step")
    with pytest.raises(WeightSyncError, match=r"at weight version 2 .* at 1: no weights arrived, or .*SendsNothing"):
        sync.sync()


def test_all_weights_of_the_version_before_stop_the_run():
    class Late(DistributedGeneration):
        def update_weights(self, ipc_handles):
            super().update_weights(stated_as_the_version_before(ipc_handles)[0])

    with pytest.raises(WeightSyncError, match="policy is at weight version 1 and the generation backend at 0"):
        synchronizer(make_policy(), make_engine(face=Late)).sync()


def test_content_of_the_version_before_under_the_new_number_stops_the_run_and_names_its_tensors():
    class Delayed(TinyPolicy):
        def iter_weights(self, names=None):
            sending = self._refit is not None and names is not None
            for name, tensor in super().iter_weights(names):
                yield name, self.previous[name] if sending and hasattr(self, "previous") else tensor

        def step(self):
            self.previous = self.weights()
            return super().step()

    with pytest.raises(WeightSyncError, match=r"(?s)differ.*at version 1.*k\.weight"):
        synchronizer(make_policy(Delayed), make_engine()).sync()


@pytest.mark.parametrize(
    ("policy_class", "engine_class", "said"),
    [
        (PolicyThatLoses, TinyEngine, r"not arrived.*q\.weight"),
        (PolicyThatRepeats, TinyEngine, r"'q\.weight' arrived twice"),
        (PolicyThatBreaks, TinyEngine, r"the disk of k\.weight is gone"),
        (TinyPolicy, ForgetfulEngine, r"(?s)differ.*k\.weight"),
    ],
)
def test_a_worker_with_wrong_refit_results_stops_the_run(policy_class, engine_class, said):
    sync = synchronizer(make_policy(policy_class), make_engine(engine_class))
    with pytest.raises(WeightSyncError, match=said):
        sync.sync()


def test_during_a_refit_the_engine_has_no_version():
    policy, engine = make_policy(), make_engine()
    synchronizer(policy, engine).sync()
    engine.prepare_refit_info(policy.prepare_refit_info())
    buckets = policy.prepare_weights_for_ipc(SMALL_BUCKETS)
    assert len(buckets) > 2
    for keys in buckets:
        engine.update_weights(policy.get_weights_ipc_handles(keys))
        assert engine.weight_version == (1 if keys is buckets[-1] else -1)
    policy.finish_refit()


def test_incompatible_models_are_rejected_before_loading():
    class Wider(TinyEngine):
        def __init__(self, context, config=None):
            super().__init__(context, width=16)

    policy, engine = make_policy(), make_engine(Wider)
    before = engine.weight_fingerprint()
    with pytest.raises(WeightSyncError, match=r"(?s)k\.weight: \[8, 8\] in the policy, \[16, 16\].*q\.bias.*running"):
        synchronizer(policy, engine).sync()
    assert engine.weight_fingerprint() == before


def test_a_prefix_cache_that_cannot_be_emptied_stops_the_run():
    class Busy(TinyEngine):
        def invalidate_kv_cache(self):
            return False

    with pytest.raises(WeightSyncError, match="prefix cache"):
        synchronizer(make_policy(), make_engine(Busy)).sync()


def test_training_in_the_middle_of_a_refit_is_refused():
    policy = make_policy()
    keys = policy.prepare_weights_for_ipc(SMALL_BUCKETS)[0]
    policy.group.run_all("step")
    with pytest.raises(Exception, match="from weight version 1 to 2 during a refit"):
        policy.get_weights_ipc_handles(keys)
    policy.finish_refit()


def test_an_engine_that_loads_too_slowly_exceeds_the_deadline():
    too_late = threading.Event()

    class Slow(DistributedGeneration):
        def update_weights(self, ipc_handles):
            too_late.wait(60.0)
            super().update_weights(ipc_handles)

    with pytest.raises(DeadlineExceededError, match="has not loaded bucket"):
        synchronizer(make_policy(), make_engine(face=Slow), deadline_s=0.2).sync()
    too_late.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rlcore-refit"):
            thread.join()  # the late loading ends before the next test begins


def test_the_first_transport_that_both_sides_support_is_chosen():
    def chosen(policy, engine, name=None):
        return usable_transports(ALL, policy_supports=policy, generation_supports=engine, name=name)[0].name

    assert chosen(NAMES, ["collective", "shared_memory", "packing"]) == "shared_memory"
    assert chosen(["collective"], NAMES) == "collective"
    assert chosen(NAMES, NAMES, "collective") == "collective"
    with pytest.raises(MissingCapabilityError, match="the generation backend collective"):
        chosen(["shared_memory"], ["collective"])
    with pytest.raises(
        MissingCapabilityError, match=r"'nvlink'.*Registered transports: by_reference, shared_memory, collective"
    ):
        chosen(NAMES, NAMES, "nvlink")


class MergedEngine(TinyEngine):
    """An engine that has merged one tensor, which does not arrive in the first bucket of many."""

    def to_replaceable(self, tensors):
        if "k.weight" in tensors:
            raise TransportDeclinedError("k.weight is merged with q.weight.")
        return tensors


@pytest.mark.parametrize("engine_class", [MergedEngine, HalfPrecisionEngine])
def test_an_engine_that_declines_a_transport_is_refitted_by_the_next_one(monkeypatch, caplog, engine_class):
    monkeypatch.setattr(transports_module, "_BUCKETS_AT_ONCE", 1)
    policy, engine = make_policy(), make_engine(engine_class)
    sync = synchronizer(policy, engine, None)
    assert sync.sync()["refit/bytes"] > 0
    assert (sync.transport_name, weights_equal(policy, engine)) == ("shared_memory", True)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the engine declines weights by_reference, so shared_memory is used: ")
    assert "k.weight" in line if engine_class is MergedEngine else "bfloat16" in line
    before = engine.group.run_one("weights")
    policy.group.run_all("step")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.group.run_one("weights").items())  # none is shared
    sync.sync()
    assert weights_equal(policy, engine)
    assert len(caplog.records) == 1


def test_the_only_transport_that_an_engine_declines_is_an_error_with_its_key():
    sync = synchronizer(make_policy(), make_engine(MergedEngine), "by_reference")
    with pytest.raises(NotSupportedError, match=r"the engine declines weights by_reference: k\.weight is merged") as caught:
        sync.sync()
    assert caught.value.key == "policy.generation.refit_transport"


def test_a_refit_aborted_by_the_policy_leaves_no_pending_load():
    policy, engine = make_policy(PolicyThatBreaks), make_engine(SlowEngine)
    with pytest.raises(WeightSyncError, match=r"the disk of k\.weight is gone"):
        synchronizer(policy, engine).sync()
    assert not engine.group.run_one("is_loading")


def test_the_disk_transport_removes_its_files_and_those_of_dead_drivers(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    orphan = tmp_path / f"rlcore-refit-{socket.gethostname()}-{int(dead.stdout)}"
    orphan.mkdir()
    policy, engine = make_policy(), make_engine()
    assert synchronizer(policy, engine, "disk", folder=tmp_path).sync()["refit/bytes"] > 0
    assert weights_equal(policy, engine)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightSyncError, match=r"the disk of k\.weight is gone"):
        synchronizer(make_policy(PolicyThatBreaks), engine, "disk", folder=tmp_path).sync()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named_with_the_key_that_sets_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"policy\.generation\.refit_folder"):
        synchronizer(make_policy(), make_engine(), "disk", folder=tmp_path / "file").sync()


def test_the_address_of_a_rendezvous_is_used_once_and_no_outgoing_connection_can_take_its_port():
    addresses = [free_loopback_port() for _ in range(300)]
    assert len(set(addresses)) == 300
    assert {ip for ip, _ in addresses} == {"127.0.0.1"}
    assert max(port for _, port in addresses) < 32_768  # from here on, Linux chooses ports of connections
