"""Generation workers killed during a refit: it restarts, is verified, and nothing waits for dead workers."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_refit_workers
import torch
from ray import cloudpickle
from shared_segments import segments_of
from tiny_refit_workers import AdaptedEngine, AdaptedPolicy, TinyEngine, TinyPolicy

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import WorkerDiedError
from rl_core.weights.adapters import adapters_in
from rl_core.weights.shared_memory import sweep
from rl_train.weight_sync.canary import RefitCanary, StreamedCanary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import CollectiveTransport, SharedMemoryTransport

pytestmark = pytest.mark.slow

FOLDER = "RLCORE_TEST_DEATHS"
REPLICAS = 2
LIMIT_S = 120.0
"""Far below the deadline of a refit and the 600 s that a broadcast may take; a restart takes 4 s on a quiet machine."""


def die_if_requested(verb, rank):
    """Kill this process in the call named by a file: `<verb>-<rank>` contains the number of the call."""
    path = Path(os.environ[FOLDER]) / f"{verb}-{rank}"
    if not path.exists():
        return
    calls = int(path.read_text()) - 1
    if calls:
        path.write_text(str(calls))
        return
    path.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


class MortalPolicy(TinyPolicy):
    def iter_weights(self, names=None):
        for named in super().iter_weights(names):
            die_if_requested("gather", self.context.rank)
            yield named


class MortalEngine(TinyEngine):
    def prepare_refit_info(self, info):
        die_if_requested("prepare_refit_info", self.context.rank)
        return super().prepare_refit_info(info)

    def init_collective(self, *args, **kwargs):
        die_if_requested("init_collective", self.context.rank)
        super().init_collective(*args, **kwargs)

    def load_weights(self, tensors):
        die_if_requested("load_weights", self.context.rank)
        super().load_weights(tensors)

    def get_weight_version(self):
        die_if_requested("get_weight_version", self.context.rank)
        return super().get_weight_version()

    def weight_fingerprint(self):
        die_if_requested("weight_fingerprint", self.context.rank)
        return super().weight_fingerprint()

    def invalidate_kv_cache(self):
        die_if_requested("invalidate_kv_cache", self.context.rank)
        return super().invalidate_kv_cache()


cloudpickle.register_pickle_by_value(tiny_refit_workers)
cloudpickle.register_pickle_by_value(__import__(__name__))


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([REPLICAS], use_gpus=False, cpus_per_bundle=0.5, max_colocated_worker_groups=4) as made:
        yield made


@pytest.fixture(scope="module")
def sides(cluster, deaths):
    """One policy rank and two replicas with many restarts."""
    policy = make_policy(cluster, deaths)
    engine = make_engine(cluster, deaths, max_restarts=100)
    yield policy, engine
    engine.shutdown()
    policy.shutdown()


def make_policy(cluster, deaths, worker_class=MortalPolicy):
    return DistributedPolicy(
        worker_class=worker_class,
        config=PolicyConfig(backend="tiny", model_name="tiny"),
        cluster=cluster,
        num_workers=1,
        env_vars={FOLDER: str(deaths)},
    )


def make_engine(cluster, deaths, worker_class=MortalEngine, **fields):
    return DistributedGeneration(
        worker_class=worker_class,
        config=GenerationConfig(backend="tiny", num_workers=REPLICAS, **fields),
        cluster=cluster,
        env_vars={FOLDER: str(deaths)},
    )


def synchronizer(policy, engine, transport, canary=None):
    return WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, transport, buffer_bytes=700, deadline_s=3600.0, num_receivers=REPLICAS, wait=wait_together),
        canary=canary,
    )


@pytest.fixture(scope="module")
def synchronizers(sides):
    """One synchronizer per transport, kept across tests as across the steps of a run."""
    policy, engine = sides
    made = {
        transport.name: synchronizer(policy, engine, transport) for transport in (SharedMemoryTransport, CollectiveTransport)
    }
    for one in made.values():
        one.sync()
    yield made
    for one in made.values():
        one.close()


def assert_equal_on_all(policy, engine):
    sent = policy.group.run_one("weights")
    for held in engine.group.run_all("weights"):
        assert [name for name, tensor in held.items() if not torch.equal(sent[name].to(tensor.dtype), tensor)] == []


FULL = pytest.mark.full("in CI replicas die before and in a transfer by the collective, and in and after one by shared memory")


@pytest.mark.parametrize(
    ("transport", "verb", "call", "ranks"),
    [
        pytest.param("shared_memory", "get_weight_version", 1, [0], marks=FULL),
        pytest.param("shared_memory", "prepare_refit_info", 1, [1], marks=FULL),
        ("shared_memory", "load_weights", 2, [1]),
        ("shared_memory", "weight_fingerprint", 1, [0, 1]),
        pytest.param("shared_memory", "invalidate_kv_cache", 1, [1], marks=FULL),
        pytest.param("collective", "prepare_refit_info", 1, [0], marks=FULL),
        pytest.param("collective", "load_weights", 1, [0], marks=FULL),
        ("collective", "load_weights", 3, [1]),
        pytest.param("collective", "load_weights", 2, [1], marks=FULL),
        pytest.param("collective", "weight_fingerprint", 1, [1], marks=FULL),
    ],
)
def test_a_refit_whose_replica_is_killed_is_restarted_and_verified(sides, synchronizers, deaths, transport, verb, call, ranks):
    policy, engine = sides
    policy.group.run_all("step")
    before, pids = engine.restarts, engine.group.pids()
    for rank in ranks:
        (deaths / f"{verb}-{rank}").write_text(str(call))
    started = time.monotonic()
    metrics = synchronizers[transport].sync(only_if_stale=True)
    assert time.monotonic() - started < LIMIT_S
    assert metrics["refit/moved"] == 1.0
    assert engine.restarts == before + len(ranks)
    assert [rank for rank in range(REPLICAS) if engine.group.pids()[rank] != pids[rank]] == ranks
    assert engine.weight_version == policy.weight_version == metrics["refit/weight_version"]
    assert_equal_on_all(policy, engine)
    assert segments_of(*(pids[rank] for rank in ranks)) == []


def restart(engine, deaths, *, rank):
    (deaths / f"get_weight_version-{rank}").write_text("1")
    with pytest.raises(WorkerDiedError) as caught:
        _ = engine.weight_version
    assert engine.restart_dead(caught.value)


def test_a_replica_that_was_restarted_between_refits_is_refitted_alone(sides, synchronizers, deaths):
    policy, engine = sides
    policy.group.run_all("step")
    owner = synchronizers["collective"]
    owner.sync()
    refits = engine.group.run_all("num_changes")
    restart(engine, deaths, rank=1)
    assert engine.weight_version == -1
    owner.provide_weights()
    assert engine.weight_version == policy.weight_version
    assert engine.group.run_all("num_changes") == [refits[0], 1]
    assert_equal_on_all(policy, engine)
    policy.group.run_all("step")
    owner.sync()  # the other replica joins again
    assert engine.group.run_all("num_changes") == [refits[0] + 1, 2]
    assert_equal_on_all(policy, engine)

    restart(engine, deaths, rank=0)
    policy.group.run_all("step")  # the other replica is behind as well
    owner.provide_weights()
    assert engine.weight_version == policy.weight_version
    assert engine.group.run_all("num_changes") == [1, 3]


class Canary:
    """Rows that are streamed over the next refit: like the rows of rollouts, they wait until every replica has weights."""

    streamed_rows = greedy = None

    def __init__(self, engine):
        self.engine, self.streams, self.checks = engine, 0, 0

    def check(self, policy, generation, *, thorough):
        self.checks += 1
        return 0.0

    def check_streamed(self, policy, generation, output):
        return 0.0

    @contextmanager
    def stream(self, rows, greedy):
        self.engine.await_weights()
        self.streams += 1
        yield lambda: {"weight_version": torch.tensor([0]), "newest_version": torch.tensor([1])}


def test_a_canary_is_streamed_over_one_refit_that_begins_with_all_replicas_and_samples_a_batch_later(sides, deaths):
    policy, engine = sides
    canary = Canary(engine)
    owner = synchronizer(policy, engine, SharedMemoryTransport, canary=RefitCanary(lambda: canary))
    owner.canary.streamed = StreamedCanary(canary.stream, over_refits=True)
    try:
        owner.sync()
        policy.group.run_all("step")
        restart(engine, deaths, rank=1)
        owner.sync()
        assert canary.streams == 0
        assert_equal_on_all(policy, engine)
        engine.await_weights()
        policy.group.run_all("step")
        owner.sync()
        assert canary.streams == 1
        checks = canary.checks
        owner.request_canary()
        policy.group.run_all("step")
        assert "refit/canary_error" in owner.sync()
        assert (canary.streams, canary.checks) == (1, checks + 1)
    finally:
        owner.close()


def test_ranks_that_wait_for_a_missing_rank_are_released(sides, synchronizers, deaths):
    policy, engine = sides
    policy.group.run_all("step")
    sync = synchronizers["collective"]
    (deaths / "load_weights-0").write_text("1")
    (deaths / "init_collective-1").write_text("1")
    started = time.monotonic()
    sync.sync()
    assert time.monotonic() - started < 2 * LIMIT_S
    assert_equal_on_all(policy, engine)


@pytest.mark.slow  # reads what the slow tests before it left
def test_the_collective_never_reuses_a_rendezvous_address(sides, synchronizers):
    transport = synchronizers["collective"].sender.transport
    assert len(transport._left) >= 4
    assert len({port for _, port in transport._left}) == len(transport._left)


@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=FULL), "collective"])
def test_a_refit_fails_without_remaining_restarts_and_names_the_dead_replica(
    sides, synchronizers, deaths, transport, caplog, monkeypatch
):
    policy, engine = sides
    sync, limit = synchronizers[transport], engine.restarts + 1
    policy.group.run_all("step")
    with monkeypatch.context() as patch:
        patch.setattr(engine._restarter, "_max_restarts", limit)
        (deaths / "load_weights-1").write_text("2")
        pids = engine.group.pids()
        with caplog.at_level(logging.WARNING, "rl_backends_base"):
            sync.sync()
        assert (
            f"rank 1 (data=1) of 'generation', host {os.uname().nodename}, pid {pids[1]} exited; restarting it" in caplog.text
        )
        assert f"a generation worker died in the refit by {transport}; the refit is repeated" in caplog.text
        policy.group.run_all("step")
        (deaths / "load_weights-0").write_text("2")
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"rank 0 .*pid {pids[0]} exited and .*max_restarts` \({limit}\)"):
            sync.sync()
        assert time.monotonic() - started < LIMIT_S
    assert segments_of(*pids) == []
    sync.sync()
    assert_equal_on_all(policy, engine)


class MortalAdaptedEngine(MortalEngine, AdaptedEngine):
    pass


@pytest.fixture
def adapted(cluster, deaths):
    policy = make_policy(cluster, deaths, AdaptedPolicy)
    engine = make_engine(cluster, deaths, MortalAdaptedEngine, max_restarts=100)
    yield policy, engine
    engine.shutdown()
    policy.shutdown()


@pytest.mark.parametrize("transport", [SharedMemoryTransport, CollectiveTransport])
def test_a_replica_that_is_killed_gets_all_weights_again_and_never_samples_without_its_adapter(adapted, deaths, transport):
    policy, engine = adapted
    sync = synchronizer(policy, engine, transport)
    everything, adapters = (len(names) for names in (policy.prepare_refit_info(), adapters_in(policy.prepare_refit_info())))
    sync.sync()
    for phase in ("prepare_refit_info", "load_weights", "weight_fingerprint", "invalidate_kv_cache"):
        policy.group.run_all("step")
        before = engine.restarts
        (deaths / f"{phase}-1").write_text("1")
        sync.sync()
        assert engine.restarts == before + 1
        assert engine.weight_version == policy.weight_version
        assert_equal_on_all(policy, engine)
        last = [len(refits[-1]) for refits in engine.group.run_all("names_of_refits")]
        assert last == [everything] * REPLICAS
        policy.group.run_all("step")
        sync.sync()
        assert [len(refits[-1]) for refits in engine.group.run_all("names_of_refits")] == [adapters] * REPLICAS
        assert_equal_on_all(policy, engine)
    restart(engine, deaths, rank=0)  # between refits: it waits for weights, and gets all of them alone
    assert engine.weight_version == -1
    sync.provide_weights()
    assert [len(refits[-1]) for refits in engine.group.run_all("names_of_refits")] == [everything, adapters]
    assert_equal_on_all(policy, engine)
    sync.close()


def test_a_policy_worker_that_dies_in_a_broadcast_is_named_and_releases_the_replicas(sides, synchronizers, deaths):
    """The last test with this fixture, because it kills the policy."""
    policy, engine = sides
    victim = policy.group.pids()[0]
    before = engine.restarts
    synchronizers["collective"].sync()
    (deaths / "gather-0").write_text("3")
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"rank 0 .*of 'policy', host {os.uname().nodename}, pid {victim}, died"):
        synchronizers["collective"].sync()
    assert len(engine.group.run_all("weights")) == REPLICAS
    assert time.monotonic() - started < LIMIT_S
    assert engine.restarts == before
    # What it kept for the next refit over shared memory is swept, as in each refit and at the end of a run.
    sweep()
    assert segments_of(victim) == []
