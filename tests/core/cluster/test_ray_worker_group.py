from __future__ import annotations

import os
import signal
import threading

import numpy as np
import psutil
import pytest
import ray
from cluster_workers import ContextFree, Drawing, Unversioned, Waiting, Worker, lives, wait_until

from rl_core.cluster import Deadlines, NamedSharding, RayVirtualCluster, RayWorkerGroup, worker_group
from rl_core.errors import (
    CheckpointError,
    DeadlineExceededError,
    ResourceInsufficientError,
    UserError,
    WorkerDiedError,
    WorkerError,
)
from rl_train.weight_sync.synchronizer import wait_together

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def cluster(local_ray):
    # Half a CPU a bundle: four ranks on a machine of two cores.
    with RayVirtualCluster([4], use_gpus=False, cpus_per_bundle=0.5, max_colocated_worker_groups=3) as made:
        yield made


@pytest.fixture(scope="module")
def square(cluster):
    """Four workers on a 2 x 2 grid."""
    grid = NamedSharding.grid(data=2, tensor=2)
    with RayWorkerGroup(cluster, Worker, worker_kwargs={"base": 10}, sharding=grid, name="square") as group:
        yield group


@pytest.fixture(scope="module")
def pair(cluster):
    """Two more workers; a test that breaks one restarts it."""
    with RayWorkerGroup(cluster, Worker, num_workers=2, name="pair", deadlines=Deadlines(stop_s=1.0, stack_s=120.0)) as group:
        yield group


@pytest.fixture
def beds(tmp_path):
    """The folder in which workers record that they sleep; at the end all are woken."""
    yield tmp_path
    for bed in tmp_path.glob("asleep-*"):
        bed.unlink()


def wait_asleep(beds, *pids):
    assert wait_until(lambda: all((beds / f"asleep-{pid}").exists() for pid in pids)), [path.name for path in beds.iterdir()]


@pytest.mark.slow
def test_every_rank_gets_its_coordinates(square):
    contexts = square.run_all("whoami")
    assert [context.rank for context in contexts] == [0, 1, 2, 3]
    assert [dict(context.coords) for context in contexts] == [
        {"data": data, "tensor": tensor} for data in range(2) for tensor in range(2)
    ]
    assert {context.world_size for context in contexts} == {4}
    assert [context.local_rank for context in contexts] == [0, 1, 2, 3]
    assert len({(context.master_address, context.master_port) for context in contexts}) == 1


def test_the_environment_of_a_process_agrees_with_its_context(square):
    for context, environ in zip(square.run_all("whoami"), square.run_all("environ"), strict=True):
        assert environ["RANK"] == str(context.rank)
        assert environ["WORLD_SIZE"] == "4"
        assert environ["LOCAL_RANK"] == str(context.local_rank)
        assert environ["MASTER_ADDR"] == context.master_address
        assert environ["MASTER_PORT"] == str(context.master_port)
        assert environ["OMP_NUM_THREADS"] == str(context.num_threads) == "1"
        assert environ["OMP_WAIT_POLICY"] == os.environ["OMP_WAIT_POLICY"]
        assert environ.get("GOMP_SPINCOUNT") == os.environ.get("GOMP_SPINCOUNT")


def test_workers_have_the_priority_of_the_driver(square):
    assert {psutil.Process(pid).nice() for pid in square.pids()} == {psutil.Process().nice()}


def test_each_kind_of_call_returns_one_result_per_input_in_order(square):
    assert square.run_all("add", 1, y=2) == [13, 13, 13, 13]
    assert square.run_one("add", 5, rank=3) == 15
    assert square.submit_some("add", {0: (1, 2), 1: 2, 2: (3,), 3: (4, 1)}).result() == [13, 12, 13, 15]


@pytest.mark.slow
def test_ray_keeps_no_memory_for_finished_calls(square):
    [server] = [process for process in psutil.Process().children(recursive=True) if process.name() == "gcs_server"]
    before = server.memory_info().rss
    for _ in range(1000):  # of four ranks; a record of each call took 4 KB
        square.run_all("add", 1)
    assert server.memory_info().rss - before < 4 * 2**20


@pytest.mark.parametrize(("axis", "expected"), [("data", ["A", "A", "B", "B"]), ("tensor", ["A", "B", "A", "B"])])
def test_shards_are_replicated_over_the_other_axis_and_answered_once(square, axis, expected):
    results = square.run_sharded("seen", ["A", "B"], "!", axis=axis)
    leaders = [0, 2] if axis == "data" else [0, 1]
    assert results == [(leaders[0], "A", "!"), (leaders[1], "B", "!")]
    assert square.run_all("last_seen") == [(rank, shard, "!") for rank, shard in enumerate(expected)]


def test_shards_that_are_not_as_many_as_the_axis_is_long_are_refused(square):
    with pytest.raises(UserError, match=r"3 shards .* axis 'data' of size 2"):
        square.run_sharded("seen", ["A", "B", "C"])
    with pytest.raises(UserError, match="pipeline"):
        square.run_sharded("seen", ["A", "B"], axis="pipeline")


def test_a_large_argument_is_stored_once_and_read_without_a_copy(square):
    array = np.ones(4_000_000)
    # A read-only array is a view of the shared object store: no rank holds a copy.
    assert square.run_all("total", array) == [(4e6, False)] * 4


def test_methods_run_on_the_main_thread_and_coroutines_are_awaited(square):
    assert all(square.run_all("on_main_thread"))
    assert square.run_one("later", 1) == 2


def test_calls_of_two_groups_run_concurrently(square, pair, tmp_path):
    """Each call waits for the other, so that sequential calls would never end."""
    calls = [
        square.submit_one("meet", str(tmp_path), "square", "pair", rank=3),
        pair.submit_one("meet", str(tmp_path), "pair", "square"),
    ]
    assert wait_together(calls, deadline_s=120.0) == [None, None]


def test_the_failure_of_one_group_ends_the_wait_for_both(square, pair, beds, monkeypatch):
    monkeypatch.setattr(worker_group, "_GRACE_S", 0.2)  # no worker dies here
    hanging = pair.submit_one("sleep_on", 0, str(beds))
    with pytest.raises(WorkerError, match="the sender failed"):
        wait_together([hanging, square.submit_all("raise_on", 1, RuntimeError("the sender failed"))], deadline_s=3600.0)
    assert not hanging.poll(0.0), "the other group was waited for"


def test_two_groups_that_hang_are_both_in_the_report(square, pair, beds):
    calls = [group.submit_one("sleep_on", 0, str(beds)) for group in (square, pair)]
    wait_asleep(beds, square.pids()[0], pair.pids()[0])
    with pytest.raises(DeadlineExceededError, match=r"(?s)of 'square'.*of 'pair'"):
        wait_together(calls, deadline_s=0.1)


def test_ranks_meet_at_the_address_and_port_of_their_context(pair):
    assert pair.run_all("sum_over_ranks") == [3, 3]


def test_an_error_names_rank_method_and_host_and_carries_the_original_traceback(square):
    with pytest.raises(WorkerError) as caught:
        square.run_all("raise_on", 2, ValueError("odd number of heads"))
    text = str(caught.value)
    for part in ("rank 2 (data=1, tensor=0) of 'square'", os.uname().nodename, "raise_on()", "odd number of heads"):
        assert part in text
    assert "in raise_on\n" in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_worker_that_calls_exit_fails_like_one_that_raises_and_stays_alive(square):
    with pytest.raises(WorkerError, match="SystemExit: 3") as caught:
        square.run_all("raise_on", 2, SystemExit(3))
    assert type(caught.value) is WorkerError
    assert square.workers_alive() == [True] * 4


def test_rlcore_errors_keep_their_exit_code_and_unpicklable_errors_their_text(square):
    with pytest.raises(WorkerError) as caught:
        square.run_one("raise_on", 1, CheckpointError("incomplete"), rank=1)
    assert caught.value.exit_code == CheckpointError.exit_code == 2
    with pytest.raises(WorkerError, match="1 and 2"):
        square.run_one("raise_unpicklable")


def test_a_constructor_that_raises_is_attributed_and_leaves_no_process(cluster, square):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(WorkerError, match=r"rank 1 \(data=1\) of 'Worker'.*__init__\(\).*no model on rank 1"):
        RayWorkerGroup(cluster, Worker, num_workers=2, worker_kwargs={"fail_on": 1})
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before and p.name().startswith("ray::")]
    assert [p.pid for p in left if "rank" in p.name()] == []


def test_a_class_without_a_context_argument_is_constructed_unchanged(cluster):
    with RayWorkerGroup(cluster, ContextFree, num_workers=1) as group:
        assert group.run_all("get_size") == [3]


def test_the_deadline_report_names_the_rank_and_the_function_that_hangs(pair, beds):
    pending = pair.submit_all("sleep_on", 1, str(beds), deadline_s=0.1)
    wait_asleep(beds, pair.pids()[1])
    pair.run_one("whoami", rank=0)  # answered after earlier calls
    with pytest.raises(DeadlineExceededError) as caught:
        pending.result()
    text = str(caught.value)
    for part in ("rank 1 (data=1) of 'pair'", f"pid {pair.pids()[1]}", "sleep_on()", "wait_for_a_peer_that_never_comes"):
        assert part in text
    assert "Answered: rank 0 (data=0) of 'pair'." in text
    pair.restart(1)
    assert pair.run_all("add", 1) == [1, 1]


def test_the_stack_is_seen_even_of_a_worker_that_holds_the_interpreter_lock(pair, beds):
    pending = pair.submit_all("hold_the_lock_on", 0, str(beds))
    wait_asleep(beds, pair.pids()[0])
    with pytest.raises(DeadlineExceededError, match="long_c_call"):
        pending.result(deadline_s=0.1)
    pair.restart(0)


def test_a_stopped_worker_is_reported_as_unresponsive_and_killed(cluster):
    deadlines = Deadlines(stop_s=0.5, stack_s=0.5)
    group = RayWorkerGroup(cluster, Worker, num_workers=1, deadlines=deadlines)
    process = psutil.Process(group.pids()[0])
    pending = group.submit_all("stop")
    assert wait_until(lambda: process.status() == psutil.STATUS_STOPPED), process.status()
    with pytest.raises(DeadlineExceededError, match="state: stopped"):
        pending.result(deadline_s=0.1)
    group.shutdown()
    assert not lives(process)


def test_a_dead_worker_is_reported_as_the_cause_instead_of_its_hanging_peers(pair, monkeypatch):
    # A busy machine may see the death late; then no call waits.
    monkeypatch.setattr(worker_group, "_GRACE_S", 120.0)
    with pytest.raises(WorkerDiedError) as caught:
        pair.run_all("die_on", 1)
    text = str(caught.value)
    assert "rank 1 (data=1) of 'pair'" in text
    assert "last words" in text
    assert pair.workers_alive() == [True, False]
    pair.restart()
    assert pair.run_all("add", 1) == [1, 1]


@pytest.mark.timeout(300)
def test_a_death_that_ray_reports_late_is_the_cause(pair, beds, monkeypatch):
    monkeypatch.setattr(worker_group, "_GRACE_S", 0.1)
    [raylet] = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
    wait, pids = worker_group._wait_for_root_cause, pair.pids()

    def report_during_the_wait(*arguments):
        threading.Timer(1.0, raylet.resume).start()
        return wait(*arguments)

    monkeypatch.setattr(worker_group, "_wait_for_root_cause", report_during_the_wait)
    pending = pair.submit_all("outlive", 1, pids[1], str(beds))
    wait_asleep(beds, *pids)
    raylet.suspend()
    try:
        (beds / f"asleep-{pids[1]}").unlink()
        with pytest.raises(WorkerDiedError, match=r"rank 1 \(data=1\) of 'pair'"):
            pending.result()
    finally:
        raylet.resume()
    pair.restart()


def test_a_call_during_a_restart_does_not_reach_the_worker_before_it_is_built(cluster, tmp_path):
    """Another thread may call all ranks, for example to measure memory, while a replica is replaced."""
    with RayWorkerGroup(cluster, Waiting, num_workers=1, worker_kwargs={"folder": str(tmp_path)}) as group:
        restart = threading.Thread(target=group.restart)
        restart.start()
        try:
            assert wait_until((tmp_path / "building").exists)
            [early] = group.submit_all("answer").settle(60.0)
        finally:
            (tmp_path / "open").touch()
            restart.join()
        assert isinstance(early, WorkerDiedError)
        assert group.run_all("answer") == [1]


def test_child_processes_of_a_worker_end_with_it_even_in_another_session(cluster):
    with RayWorkerGroup(cluster, Worker, num_workers=1) as group:
        pids = group.run_one("spawn")
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(group.pids()[0], signal.SIGKILL)
        wait_until(lambda: not any(map(lives, pids)))
        assert [psutil.Process(pid).name() for pid in pids if lives(pid)] == []


def test_a_group_too_many_on_the_same_bundles_is_refused_at_once(cluster, square, pair):
    with (
        RayWorkerGroup(cluster, ContextFree, num_workers=1),
        pytest.raises(ResourceInsufficientError, match="max_colocated_worker_groups=4"),
    ):
        RayWorkerGroup(cluster, ContextFree, num_workers=1)


def test_more_workers_than_bundles_are_refused(cluster):
    with pytest.raises(ResourceInsufficientError, match=r"5 workers .* 4 bundles"):
        RayWorkerGroup(cluster, ContextFree, num_workers=5)


def test_requesting_too_many_workers_is_an_immediate_error_with_a_fix(local_ray):
    with pytest.raises(ResourceInsufficientError) as caught:
        RayVirtualCluster([8, 8])
    text = str(caught.value)
    assert "are in use" not in text, "it was waited for resources that nobody can give back"
    for part in ("[8, 8]", "16 bundles", "Ray has 1 node", "Change:"):
        assert part in text


def test_resources_in_use_are_distinguished_from_missing_resources(cluster):
    total = ray.cluster_resources()["CPU"]
    with pytest.raises(ResourceInsufficientError, match="the missing resources are in use"):
        RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=total)


@pytest.mark.slow
def test_each_training_call_of_any_worker_is_seeded_by_its_rank_and_weight_version(cluster):
    with RayWorkerGroup(cluster, Drawing, num_workers=2, name="drawing") as group:
        unbroken = [group.run_all("train") for _ in range(3)]
    with RayWorkerGroup(cluster, Drawing, num_workers=2, name="drawing") as group:
        group.run_all("load_checkpoint", 2)
        assert group.run_all("train") == unbroken[2]
    assert len({draw for calls in unbroken for rank in calls for draw in rank}) == 12


def test_a_class_without_weight_versions_may_have_a_method_train(cluster):
    with RayWorkerGroup(cluster, Unversioned, num_workers=1, name="unversioned") as group:
        assert group.run_all("train") == ["trained"]
