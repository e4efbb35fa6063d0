"""Calls on several workers when one dies: which are awaited, which results are kept, and which failure is reported."""

import inspect
import os
import pickle
import signal

import pytest
from cluster_workers import Worker

from rl_backends_base.distributed_generation import WorkerRestarter
from rl_core.cluster import InProcessWorkerGroup, RayVirtualCluster, RayWorkerGroup, worker_group
from rl_core.cluster.remote_actor import RemoteActor
from rl_core.errors import UserError, WorkerDiedError, WorkerError
from rl_train.weight_sync.synchronizer import wait_together


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([3], use_gpus=False, cpus_per_bundle=0.5, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def trio(cluster):
    """Three workers; a test that kills one restarts it."""
    with RayWorkerGroup(cluster, Worker, name="trio") as group:
        yield group


@pytest.mark.slow
def test_a_settled_call_keeps_the_results_of_live_workers(trio):
    os.kill(trio.pids()[1], signal.SIGKILL)
    first, died, last = trio.submit_some("add", {0: (1,), 1: (2,), 2: (3, 4)}).settle(120.0)
    assert (first, last) == (1, 7)
    assert isinstance(died, WorkerDiedError)
    assert trio.workers_alive() == [True, False, True]
    trio.restart(1)
    assert trio.submit_some("add", {2: (5,), 1: (6,)}).result() == [5, 6]


def test_a_worker_that_raises_ends_the_wait_of_a_settled_call(trio):
    with pytest.raises(WorkerError, match=r"rank 2 .*too little"):
        trio.submit_all("raise_on", 2, ValueError("too little")).settle(120.0)


@pytest.mark.parametrize("in_process", [True, False])
def test_the_frames_of_an_exception_that_cannot_be_pickled_are_fields_of_the_error(trio, in_process):
    group = InProcessWorkerGroup(Worker, name="alone") if in_process else trio
    with pytest.raises(WorkerError) as caught:
        group.run_one("raise_from_a_cause")
    source, first = inspect.getsourcelines(Worker.raise_from_a_cause)
    lines = [first + number for number, line in enumerate(source) if "raise " in line]
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert [line for file, line in error.frames if file.endswith("cluster_workers.py")] == lines
        assert error.raised.endswith("UnpicklableError: wrapped")
        assert error.group == ("alone" if in_process else "trio")


def test_a_rank_is_named_with_its_host_and_process(trio):
    assert trio.describe_rank(2) == f"rank 2 (data=2) of 'trio', host {os.uname().nodename}, pid {trio.pids()[2]}"


def test_a_death_in_one_group_explains_the_failure_that_another_saw_first(cluster, trio, tmp_path, monkeypatch):
    # A busy machine may see the death late; then no call waits.
    monkeypatch.setattr(worker_group, "_GRACE_S", 120.0)
    with RayWorkerGroup(cluster, Worker, name="peers", num_workers=1) as peers:
        seen_first = peers.submit_all("raise_on", 0, ValueError("connection closed by peer"))
        with pytest.raises(WorkerError):
            seen_first.result()
        sleeping = trio.submit_all("sleep_on", 1, str(tmp_path))
        os.kill(trio.pids()[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"(?s)rank 1 .*'trio'.* died in .*Also failed:\n- rank 0 .*peer"):
            wait_together([seen_first, sleeping], 3600.0)
    trio.restart(1)


def test_a_rank_is_not_restarted_and_not_counted_while_one_of_another_group_is_dead(cluster, trio):
    restarter = WorkerRestarter(trio, max_restarts=1, key="max_restarts", start_s=60)
    with RayWorkerGroup(cluster, Worker, name="peers", num_workers=1) as peers:
        os.kill(peers.pids()[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            peers.run_all("add", 1)
        os.kill(trio.pids()[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            trio.run_all("add", 1)
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match=r"^rank 0 \(data=0\) of 'peers', .*has died\. Run the same"):
                restarter.restart_dead([{}] * 3)
    assert restarter.count == 0
    trio.restart(1)


def test_an_actor_killed_before_it_ran_is_a_death_whose_process_has_not_started(cluster):
    actor = RemoteActor("actor 0 of 'pool'", options={}, env={}, runtime_env={})
    actor.kill()
    with pytest.raises(WorkerDiedError, match=r"actor 0 of 'pool', its process has not started, died in start\. Ray says: "):
        actor.started().result()


def test_a_group_in_this_process_answers_for_its_one_rank():
    with InProcessWorkerGroup(Worker, name="alone") as alone:
        assert alone.submit_some("add", {0: (1, 2)}).settle() == [3]
        assert alone.submit_one("add", 4).settle() == [4]
        assert alone.describe_rank(0) == "rank 0 of 'alone', in this process"
        with pytest.raises(UserError):
            alone.submit_some("add", {1: (1,)})
