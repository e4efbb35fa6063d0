from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray
from cluster_workers import Worker
from ray.cluster_utils import Cluster

from rl_core.cluster import ActorPool, NamedSharding, RayVirtualCluster, RayWorkerGroup, remote_actor
from rl_core.errors import DeadlineExceededError, ResourceInsufficientError, WorkerDiedError


@pytest.fixture(scope="module")
def nodes():
    """A Ray of two nodes of two CPUs each, on this machine."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
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
    with RayWorkerGroup(cluster, Worker, sharding=NamedSharding.grid(data=2, tensor=2)) as made:
        yield made


def test_ranks_fill_the_nodes_in_order(cluster, group):
    assert (cluster.world_size(), cluster.node_count(), len(cluster.get_placement_groups())) == (4, 2, 2)
    contexts = group.run_all("whoami")
    assert [context.node_rank for context in contexts] == [0, 0, 1, 1]
    assert [context.local_rank for context in contexts] == [0, 1, 0, 1]
    planned = [bundle.node.node_id for bundle in cluster.bundles]
    assert [actor.identity.node_id for actor in group._actors] == planned
    assert len(set(planned)) == 2


def test_the_meeting_point_is_on_the_node_of_rank_zero(cluster, group):
    address, port = cluster.get_master_address_and_port()
    assert address == cluster.bundles[0].node.address == group.context_of(3).master_address
    assert port != group.context_of(0).master_port
    assert cluster.get_master_address_and_port()[1] != port


def test_shards_cross_nodes_and_come_back_once_each(group):
    assert group.run_sharded("seen", ["A", "B"]) == [(0, "A", ""), (2, "B", "")]
    assert [shard for _, shard, _ in group.run_all("last_seen")] == ["A", "A", "B", "B"]


def test_three_nodes_where_there_are_two_is_an_error_that_counts_them(nodes):
    with pytest.raises(ResourceInsufficientError, match=r"(?s)3 nodes.*Ray has 2 nodes"):
        RayVirtualCluster([1, 1, 1], use_gpus=False)


def test_the_stack_of_a_worker_on_another_host_is_fetched_from_its_node(group, monkeypatch):
    # The nodes share this machine: a driver that believes to be elsewhere must ask the node.
    monkeypatch.setattr(remote_actor, "gethostname", lambda: "another-host")
    with pytest.raises(DeadlineExceededError, match="wait_for_a_peer_that_never_comes"):
        group.run_all("sleep_on", 3, 4.0, deadline_s=0.3)
    assert group.workers_alive() == [True] * 4
    monkeypatch.undo()
    assert group.run_all("add", 1) == [1] * 4


def test_a_driver_that_joined_and_is_killed_leaves_nothing_on_the_nodes(nodes, cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import subprocess, time\n"
        "from rl_core.cluster import ActorPool\n"
        "class Parent:\n"
        "    def spawn(self):\n"
        "        return subprocess.Popen(['sleep', '600'], start_new_session=True).pid\n"
        "pool = ActorPool(None, Parent)\n"
        "print('ready', pool.run_one('spawn'), *pool.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "RAY_ADDRESS": nodes.address}
    driver = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("ready"))
    left = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until = time.monotonic() + 20
    while any(map(_lives, left)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [process.pid for process in left if _lives(process)] == []
    assert len(ray.nodes()) == 2, "the cluster itself must live on"


def test_a_pool_on_the_cluster_serves_while_its_bundles_are_taken(cluster, group):
    with ActorPool(cluster, Worker, 2, {"base": 1}) as pool:
        assert pool.map("add", [1, 2, 3]) == [2, 3, 4]


def test_the_loss_of_a_node_is_reported_for_each_of_its_ranks(nodes, cluster):
    with RayWorkerGroup(cluster, Worker, name="lost") as group:
        nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
        with pytest.raises(WorkerDiedError, match=r"rank [23] .*of 'lost'"):
            group.run_all("sleep_on", 3, 30.0, deadline_s=60.0)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
