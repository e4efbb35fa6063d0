"""Refits between real processes: shared memory and gloo, with faults, errors and kills."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest
import torch
from refit_processes import ProcessEngine, ProcessPolicy, WorkerProcess
from tiny_refit_workers import (
    ForgetfulEngine,
    GatheringPolicy,
    HalfPrecisionEngine,
    MortalEngine,
    PolicyThatBreaks,
    PolicyThatLoses,
    PolicyThatRepeats,
    TinyEngine,
    TinyPolicy,
)

from rl_core.errors import WeightSyncError
from rl_core.rendezvous.interfaces import free_port
from rl_core.weights.collective import WeightCollective, abort_rendezvous
from rl_core.weights.shared_memory import DIRECTORY
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import CollectiveTransport, SharedMemoryTransport, free_loopback_port

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
"""Far below the deadlines of these refits, of which none may be waited for."""


@pytest.fixture(scope="module")
def processes():
    workers = [WorkerProcess(TinyPolicy), WorkerProcess(TinyEngine, 0), WorkerProcess(TinyEngine, 1)]
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def sides(processes):
    """A new policy at version 1 and two new engines, in processes that are reused."""

    def make(policy_class=TinyPolicy, engine_class=TinyEngine):
        processes[0].become(policy_class)
        for seed, process in enumerate(processes[1:], 2):
            process.become(engine_class, seed=seed)
        policy, engine = ProcessPolicy(processes[0]), ProcessEngine(*processes[1:])
        policy.step()
        return policy, engine

    return make


def synchronizer(policy, engine, transport, *, buffer_bytes: int = 700, deadline_s: float = 3600.0):
    return WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, transport, buffer_bytes=buffer_bytes, deadline_s=deadline_s, num_receivers=len(engine.ranks)),
    )


def assert_equal_on_all(policy, engine) -> None:
    sent = policy.weights()
    for rank in engine.ranks:
        held = rank.submit("weights").result()
        assert [name for name, tensor in held.items() if not torch.equal(sent[name].to(tensor.dtype), tensor)] == []


TRANSPORTS = pytest.mark.parametrize("transport", [SharedMemoryTransport, CollectiveTransport])


@TRANSPORTS
@pytest.mark.parametrize("engine_class", [TinyEngine, HalfPrecisionEngine])
def test_every_replica_computes_with_the_policys_weights_after_every_sync(sides, transport, engine_class):
    policy, engine = sides(engine_class=engine_class)
    sync = synchronizer(policy, engine, transport)
    for version in (1, 2, 3):
        assert sync.is_stale
        metrics = sync.sync()
        assert_equal_on_all(policy, engine)
        assert metrics["refit/weight_version"] == engine.weight_version == version
        assert metrics["refit/bytes"] >= sum(t.numel() * engine_class.dtype.itemsize for t in policy.weights().values())
        policy.step()
    sync.close()


@TRANSPORTS
@pytest.mark.parametrize(
    ("policy_class", "engine_class", "said"),
    [
        (PolicyThatLoses, TinyEngine, r"not arrived.*q\.weight"),
        (PolicyThatRepeats, TinyEngine, r"'q\.weight' arrived twice"),
        (TinyPolicy, ForgetfulEngine, r"(?s)differ.*k\.weight"),
    ],
)
def test_a_fault_stops_the_run_and_names_the_tensor(sides, transport, policy_class, engine_class, said):
    policy, engine = sides(policy_class, engine_class)
    with pytest.raises(WeightSyncError, match=said):
        synchronizer(policy, engine, transport).sync()


def test_after_a_refused_broadcast_the_next_refit_works(sides, processes):
    policy, engine = sides(PolicyThatRepeats)
    sync = synchronizer(policy, engine, CollectiveTransport)
    with pytest.raises(WeightSyncError, match="arrived twice"):
        sync.sync()
    processes[0].become(TinyPolicy)
    policy.step()
    sync.sync()
    assert_equal_on_all(policy, engine)


def test_a_policy_that_breaks_in_the_middle_of_a_broadcast_leaves_no_engine_waiting(sides):
    policy, engine = sides(PolicyThatBreaks)
    started = time.monotonic()
    with pytest.raises(OSError, match=r"k\.weight is gone"):
        synchronizer(policy, engine, CollectiveTransport).sync()
    for rank in engine.ranks:
        assert rank.submit("get_weight_version").result(timeout=LIMIT_S) == -1
    assert time.monotonic() - started < LIMIT_S


def test_an_engine_that_dies_in_the_middle_of_a_broadcast_leaves_no_rank_of_the_policy_gathering(processes):
    """The other rank would wait in a gather that rank 0 does not start, and could not take part in the next refit."""
    policy = ProcessPolicy(WorkerProcess(GatheringPolicy, 0), WorkerProcess(GatheringPolicy, 1))
    policy.join(free_port("127.0.0.1"))
    started = time.monotonic()
    mortal = ProcessEngine(WorkerProcess(MortalEngine))
    sync = synchronizer(policy, mortal, CollectiveTransport)
    with pytest.raises((WeightSyncError, BrokenProcessPool)):
        sync.sync()
    assert policy.ranks[1].submit("get_weight_version").result(timeout=LIMIT_S) == 0
    processes[1].become(TinyEngine)
    engine = ProcessEngine(processes[1])
    synchronizer(policy, engine, CollectiveTransport).sync()
    assert_equal_on_all(policy, engine)
    assert time.monotonic() - started < LIMIT_S
    policy.shutdown()
    for rank in (*policy.ranks, *mortal.ranks):
        rank.close()


def test_a_policy_that_is_killed_in_the_middle_of_a_refit_leaves_nothing_in_shared_memory(processes):
    victim = WorkerProcess(TinyPolicy)
    policy, engine = ProcessPolicy(victim), ProcessEngine(processes[1])
    pid = policy.get_weight_version() or victim.pid
    kept: list[str] = []

    class KilledInTheMiddle(ProcessEngine):
        def update_weights(self, handles):
            kept.append(handles["segment"])
            assert (DIRECTORY / handles["segment"]).exists()
            os.kill(pid, signal.SIGKILL)
            return self._all("update_weights", handles)

    sync = synchronizer(policy, KilledInTheMiddle(*engine.ranks), SharedMemoryTransport)
    process = psutil.Process(pid)
    with pytest.raises(BrokenProcessPool):
        sync.sync()
    psutil.wait_procs([process], timeout=LIMIT_S)
    sync.close()
    assert kept
    assert not any((DIRECTORY / name).exists() for name in kept)
    victim.close()


def test_an_engine_that_never_joins_is_an_error_within_the_deadline():
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="Rank 0 of 2 could not join"):
        WeightCollective(*free_loopback_port(), 2, rank=0, device="cpu", timeout_s=2.0).join()
    assert time.monotonic() - started < LIMIT_S


def test_a_rank_that_joins_after_an_abort_is_released_immediately():
    """Rank 0 has given up by then; the late rank would retry its closed port for the whole timeout."""
    ip, port = free_loopback_port()
    ranks = [WeightCollective(ip, port, 3, rank=rank, device="cpu", timeout_s=3600.0) for rank in range(2)]
    started = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        joining = beside.submit(ranks[0].join)
        abort_rendezvous(ip, port)
        with pytest.raises(WeightSyncError, match="another rank died"):
            joining.result()
    with pytest.raises(WeightSyncError, match="another rank died"):
        ranks[1].join()
    assert time.monotonic() - started < LIMIT_S
    for rank in ranks:
        rank.close()
