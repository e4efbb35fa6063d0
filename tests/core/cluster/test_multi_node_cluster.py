"""Workers on several nodes with several bundles each, on a Ray with simulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from cluster_workers import Worker, lives, wait_until
from ray.cluster_utils import Cluster

from rl_core.cluster import Deadlines, NamedSharding, RayVirtualCluster, RayWorkerGroup, remote_actor
from rl_core.errors import DeadlineExceededError, ResourceInsufficientError, WorkerDiedError
from rl_train.pools.actor_pool import ActorPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(no_ray):
    """A Ray with two nodes on this machine, one with four simulated GPUs and one with one."""
    unused = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # otherwise workers get hardly any CPU time next to other tests
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "num_gpus": 4, **unused})
        made.add_node(num_cpus=3, num_gpus=1, include_log_monitor=False)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes):
    with RayVirtualCluster([2, 2], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def group(cluster):
    grid, deadlines = NamedSharding.grid(data=2, tensor=2), Deadlines(stack_s=120.0)
    with RayWorkerGroup(cluster, Worker, sharding=grid, deadlines=deadlines) as made:
        yield made


def test_ranks_fill_the_nodes_in_order(cluster, group):
    assert (cluster.world_size(), len({bundle.node.node_id for bundle in cluster.bundles})) == (4, 2)
    contexts = group.run_all("whoami")
    assert [context.node_rank for context in contexts] == [0, 0, 1, 1]
    assert [context.local_rank for context in contexts] == [0, 1, 0, 1]
    planned = [bundle.node.node_id for bundle in cluster.bundles]
    assert [actor.identity.node_id for actor in group._actors] == planned
    assert len(set(planned)) == 2


def test_the_meeting_point_is_on_the_node_of_rank_zero(cluster, group):
    address, port = cluster.get_master_address_and_port()
    assert address == cluster.bundles[0].node.address == group._contexts[3].master_address
    assert port != group._contexts[0].master_port
    assert cluster.get_master_address_and_port()[1] != port


def test_shards_cross_nodes_and_come_back_once_each(group):
    assert group.run_sharded("seen", ["A", "B"]) == [(0, "A", ""), (2, "B", "")]
    assert [shard for _, shard, _ in group.run_all("last_seen")] == ["A", "A", "B", "B"]


def test_requesting_more_nodes_than_exist_is_an_error_with_both_counts(nodes):
    with pytest.raises(ResourceInsufficientError, match=r"(?s)3 nodes.*Ray has 2 nodes"):
        RayVirtualCluster([1, 1, 1], use_gpus=False)


def test_the_stack_of_a_worker_on_another_host_is_fetched_from_its_node(group, monkeypatch, tmp_path):
    # The nodes share this machine: a driver on another node must query the node.
    monkeypatch.setattr(remote_actor, "gethostname", lambda: "another-host")
    pending = group.submit_all("sleep_on", 3, str(tmp_path))
    bed = Path(tmp_path / f"asleep-{group.pids()[3]}")
    assert wait_until(bed.exists)
    with pytest.raises(DeadlineExceededError, match="wait_for_a_peer_that_never_comes"):
        pending.result(deadline_s=0.1)
    assert group.workers_alive() == [True] * 4
    monkeypatch.undo()
    bed.unlink()
    assert group.run_all("add", 1) == [1] * 4


def test_a_driver_that_joined_and_is_killed_leaves_nothing_on_the_nodes(nodes, cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import subprocess, time\n"
        "from rl_train.pools.actor_pool import ActorPool\n"
        "class Parent:\n"
        "    def spawn(self):\n"
        "        return subprocess.Popen(['sleep', '600'], start_new_session=True).pid\n"
        "pool = ActorPool(None, Parent)\n"
        "print('ready', pool.submit('spawn').result(), *pool.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "RAY_ADDRESS": nodes.address}
    driver = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("ready"))
    left = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not any(map(lives, left)))
    assert [process.pid for process in left if lives(process)] == []
    assert len(ray.nodes()) == 2, "the cluster itself must live on"


def test_a_pool_on_the_cluster_serves_while_its_bundles_are_taken(cluster, group):
    with ActorPool(cluster, Worker, 2, {"base": 1}) as pool:
        assert [pool.submit("add", x).result(60) for x in (1, 2, 3)] == [2, 3, 4]


def started_processes():
    return {process.pid for process in psutil.Process().children(recursive=True) if lives(process)}


def gpus_of(environ):
    return set(environ["CUDA_VISIBLE_DEVICES"].split(","))


def test_a_worker_with_two_bundles_sees_only_the_gpus_of_both(nodes):
    with RayVirtualCluster([4], use_gpus=True, max_colocated_worker_groups=2) as cluster:
        before = started_processes()
        with (
            RayWorkerGroup(cluster, Worker, bundles_per_worker=2, name="sampler") as pairs,
            RayWorkerGroup(cluster, Worker, name="trainer", num_workers=2) as singles,
        ):
            seen = [gpus_of(environ) for environ in pairs.run_all("environ")]
            assert [len(gpus) for gpus in seen] == [2, 2]
            assert set.union(*seen) == {"0", "1", "2", "3"}
            # Bundles are given in rank order: trainers 0 and 1 are on the GPUs of sampler 0.
            alone = [gpus_of(environ) for environ in singles.run_all("environ")]
            assert alone[0] | alone[1] == seen[0]
            pairs.restart(0)
            assert gpus_of(pairs.run_one("environ")) == seen[0]
        assert wait_until(lambda: started_processes() <= before), started_processes() - before


def test_a_group_on_cpus_sees_no_gpu_of_its_node(nodes):
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        assert group.run_one("environ")["CUDA_VISIBLE_DEVICES"] == ""


def test_bundles_that_are_too_few_or_lie_on_two_nodes_are_refused_with_what_to_change(nodes):
    with RayVirtualCluster([3, 1], use_gpus=True) as cluster:
        with pytest.raises(ResourceInsufficientError, match="bundles of worker 1 are on 2 nodes"):
            RayWorkerGroup(cluster, Worker, bundles_per_worker=2, num_workers=2)
        with pytest.raises(ResourceInsufficientError, match=r"2 workers of 3 bundles each were requested, .* has 4 bundles"):
            RayWorkerGroup(cluster, Worker, bundles_per_worker=3, num_workers=2)


def test_the_loss_of_a_node_is_reported_for_each_of_its_ranks(nodes, group, tmp_path):
    """The last test but one, because it removes a node."""
    nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
    with pytest.raises(WorkerDiedError, match=r"rank [23] .*of 'Worker'"):
        group.run_all("sleep_on", 3, str(tmp_path), deadline_s=240.0)


def test_a_rank_whose_node_died_waits_for_another_node_and_is_restarted_there(nodes, group, monkeypatch):
    assert wait_until(lambda: [node["Alive"] for node in ray.nodes()].count(False) == 1)
    monkeypatch.setattr(group, "_deadlines", Deadlines(start_s=1.0))
    with pytest.raises(DeadlineExceededError) as error:
        group.restart(2)
    assert "It needs [{'CPU': 1.0}, {'CPU': 1.0}]. Ray has " in str(error.value)
    assert ("with 6 CPUs" in str(error.value), "with 3 CPUs" in str(error.value)) == (True, False)
    monkeypatch.undo()
    joined = nodes.add_node(num_cpus=2, include_log_monitor=False)
    for rank in (2, 3):
        group.restart(rank)
    assert group.workers_alive() == [True] * 4
    assert [actor.identity.node_id for actor in group._actors[2:]] == [joined.node_id] * 2
    assert group.run_all("add", 1) == [1] * 4
