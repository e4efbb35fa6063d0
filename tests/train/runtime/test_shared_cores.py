"""Whether policy and engine have more threads than cores, in which case they take turns."""

from dataclasses import dataclass, field

import pytest

from rl_core.cluster.placement import Node
from rl_train.assembly.placement import share_cores


@dataclass
class Bundle:
    node: Node


@dataclass
class Cluster:
    """Bundles of a cluster, each with as many threads."""

    threads: int
    nodes: list = field(default_factory=list)
    use_gpus: bool = False

    @property
    def bundles(self):
        return [Bundle(node) for node in self.nodes]

    def threads_of(self, bundle):
        return self.threads


def node(name, cpus=8.0):
    return Node(node_id=name, address="127.0.0.1", cpus=cpus, gpus=0.0, free_cpus=cpus, free_gpus=0.0)


def test_the_bundles_of_the_policy_are_shared_unless_there_are_cores_for_both():
    for threads, shared in ((8, True), (5, True), (4, False)):
        cluster = Cluster(threads, [node("a")])
        assert share_cores(cluster, cluster) is shared


def test_bundles_of_the_engine_share_cores_only_on_the_same_node():
    policy = Cluster(8, [node("a")])
    assert share_cores(policy, Cluster(1, [node("b"), node("a")]))
    assert not share_cores(policy, Cluster(8, [node("b")]))


@pytest.mark.parametrize("on_gpus", ["policy", "engine"])
def test_gpus_are_not_cores(on_gpus):
    nodes = [node("a")]
    assert not share_cores(Cluster(8, nodes, use_gpus=on_gpus == "policy"), Cluster(8, nodes, use_gpus=on_gpus == "engine"))


def test_in_one_process_the_engine_computes_in_the_callers_thread():
    assert not share_cores(None, None)
