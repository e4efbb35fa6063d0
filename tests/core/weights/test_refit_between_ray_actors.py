"""Refits between real Ray actors, through the facades and worker groups that a run has."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import tiny_refit_workers
import torch
from ray import cloudpickle
from shared_segments import segments_of
from tiny_refit_workers import (
    ForgetfulEngine,
    ForgetfulSecondReplica,
    HalfPrecisionEngine,
    PolicyThatRepeats,
    TinyEngine,
    TinyPolicy,
)

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import WeightSyncError, WorkerDiedError
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import CollectiveTransport, SharedMemoryTransport

cloudpickle.register_pickle_by_value(tiny_refit_workers)


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=2) as made:
        yield made


def make_policy(cluster, policy_class=TinyPolicy):
    """Two ranks at version 1."""
    policy = DistributedPolicy(
        worker_class=policy_class, config=PolicyConfig(backend="tiny", model_name="tiny"), cluster=cluster
    )
    policy.group.run_all("step")
    return policy


@pytest.fixture(scope="module")
def policy(cluster):
    """The policy of all tests that leave it alive."""
    made = make_policy(cluster)
    yield made
    made.shutdown()


@pytest.fixture
def engine_of(cluster):
    """Makes two replicas."""
    started = []

    def make(engine_class=TinyEngine):
        started.append(
            DistributedGeneration(
                worker_class=engine_class, config=GenerationConfig(backend="tiny"), cluster=cluster, num_workers=2
            )
        )
        return started[-1]

    yield make
    for engine in started:
        engine.shutdown()


def synchronizer(policy, engine, transport):
    return WeightSynchronizer(
        policy, engine, WeightSender(policy, transport, buffer_bytes=700, deadline_s=120.0, num_receivers=2, wait=wait_together)
    )


def assert_equal_on_all(policy, engine):
    sent = policy.group.run_one("weights")
    for held in engine.group.run_all("weights"):
        assert [name for name, tensor in held.items() if not torch.equal(sent[name].to(tensor.dtype), tensor)] == []


@pytest.mark.full("test_revival_in_refit.py refits over both transports; backends_megatron/test_ray_ranks.py from two ranks")
def test_both_transports_send_every_step_to_every_replica(policy, engine_of):
    engine = engine_of(HalfPrecisionEngine)
    for transport in (SharedMemoryTransport, CollectiveTransport):
        sync = synchronizer(policy, engine, transport)
        for _ in range(2):
            sync.sync()
            assert_equal_on_all(policy, engine)
            assert engine.weight_version == policy.weight_version
            policy.group.run_all("step")
        sync.close()


@pytest.mark.full("test_refit_between_processes.py has the faults of both sides, without Ray")
def test_a_tensor_that_one_replica_does_not_load_is_named(policy, engine_of):
    engine = engine_of(ForgetfulSecondReplica)
    with pytest.raises(WeightSyncError, match=r"(?s)replicas do not have.*k\.weight: .* in replica 0, .* in replica 1"):
        synchronizer(policy, engine, SharedMemoryTransport).sync()


@pytest.mark.full("test_refit_between_processes.py has the faults of both sides, without Ray")
def test_faults_in_actors_stop_the_run_and_name_the_tensor(cluster, policy, engine_of):
    policy.shutdown()
    policy, engine = make_policy(cluster, PolicyThatRepeats), engine_of(ForgetfulEngine)
    for transport in (SharedMemoryTransport, CollectiveTransport):
        with pytest.raises(WeightSyncError, match=r"'q\.weight' arrived twice"):
            synchronizer(policy, engine, transport).sync()
    policy.shutdown()


@pytest.mark.full("test_revival_in_refit.py kills such a worker; test_refit_between_processes.py looks for what is left")
def test_a_policy_actor_that_is_killed_in_the_middle_of_a_refit_is_named_and_leaves_nothing(cluster, policy, engine_of):
    policy.shutdown()
    policy, engine = make_policy(cluster), engine_of()
    victim = policy.group.pids()[0]
    push = engine.update_weights

    def kill_and_push(handles):
        os.kill(victim, signal.SIGKILL)
        push(handles)

    engine.update_weights = kill_and_push
    sync = synchronizer(policy, engine, SharedMemoryTransport)
    process = psutil.Process(victim)
    with pytest.raises(WorkerDiedError):
        sync.sync()
    psutil.wait_procs([process], timeout=120)
    sync.close()
    assert segments_of(victim) == []
    policy.shutdown()
