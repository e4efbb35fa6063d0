from __future__ import annotations

import pytest

from rl_core.cluster.placement import Node, Request, insufficient, plan
from rl_core.errors import UserError


def _node(name, cpus, gpus=0, free=None):
    free_cpus = cpus if free is None else free
    return Node(node_id=name, address=name, cpus=cpus, gpus=gpus, free_cpus=free_cpus, free_gpus=gpus)


def _request(entries, cpus=1.0, gpus=0.0):
    return Request(entries=tuple(entries), cpus_per_bundle=cpus, gpus_per_bundle=gpus)


def _names(request, nodes, free=False):
    chosen = plan(request, nodes, free=free)
    return None if chosen is None else [node.node_id for node in chosen]


def test_the_largest_entry_takes_the_largest_node_in_any_order():
    assert _names(_request([2, 8, 4]), [_node("a", 8), _node("b", 2), _node("c", 4)]) == ["b", "a", "c"]


def test_entries_never_share_a_node():
    assert _names(_request([2, 2]), [_node("a", 8)]) is None
    assert _names(_request([2, 2]), [_node("a", 8), _node("b", 2)]) == ["a", "b"]


def test_a_bundle_needs_all_of_its_kinds_of_resource():
    nodes = [_node("a", 16, gpus=1), _node("b", 2, gpus=8)]
    assert _names(_request([2], gpus=1.0), nodes) == ["b"]
    assert _names(_request([3], gpus=1.0), nodes) is None


def test_free_resources_count_only_on_request():
    nodes = [_node("a", 4, free=1)]
    assert _names(_request([2]), nodes) == ["a"]
    assert _names(_request([2]), nodes, free=True) is None


def test_the_error_names_requested_and_available_resources_and_a_fix():
    nodes = [_node("10.0.0.1", 4)]
    text = str(insufficient(_request([2, 2]), nodes, free=False))
    for part in ("[2, 2]", "4 bundles", "2 nodes", "10.0.0.1 with 4 CPUs", "at most bundle_ct_per_node_list=[4]"):
        assert part in text


@pytest.mark.parametrize(("entries", "cpus"), [([], 1.0), ([0], 1.0), ([1], 0.0)])
def test_an_invalid_resource_request_is_an_error(entries, cpus):
    with pytest.raises(UserError):
        _request(entries, cpus)
