"""Runs on nodes with their own network, host name, /tmp and /dev/shm: nodes die in every phase of a step.

The driver is on the first node, which does not die. A run that lost a node of its policy ends, and resumes on fewer or more
nodes; one that lost the node of its engine continues on another one.
"""

import json
import signal

import pytest
from e2e_runs import checkpoint_of, merged, metrics_of
from held_runs import PHASES, Held, assert_history, holdable
from network_nodes import make_nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("core/cluster/test_multi_node_cluster.py has nodes without own networks; these runs take minutes"),
    pytest.mark.timeout(3600),
]


@pytest.fixture
def start(train, tmp_path):
    """Creates nodes with one CPU each; returns them and a function that starts a run on the first."""
    made = []

    def on(count):
        nodes = make_nodes(count, tmp_path)
        made.append(nodes)
        for number in range(count):
            nodes.start_ray(number)
        return nodes, lambda config: train(config, before=nodes.command(0), environment=nodes.environment())

    yield on
    for nodes in made:
        nodes.close()


def test_a_run_whose_policy_lost_a_node_in_any_phase_resumes_on_one_node_or_on_two(start, slow_turns, tmp_path):
    steps, config = 16, holdable(slow_turns, tmp_path)
    nodes, train = start(2)

    def on(count):
        return merged(config(steps), {"cluster": {"num_nodes": count, "workers_per_node": 1}})

    for phase in PHASES:
        run = train(on(2))
        run.wait_for(checkpoint_of(1, tmp_path).exists, timeout=600)
        held = Held(run, tmp_path)
        held.wait_in(phase)
        nodes.kill(1)
        held.release()
        code, output = run.wait(600)
        assert code == 1, output
        assert "of 'policy', host node2" in output
        assert "Traceback" not in output
        assert nodes.actors(0) == []
        run.assert_gone()
        before = max(metrics_of(tmp_path))
        run = train(on(1))  # while the node is missing
        run.wait_for(lambda run=run, line=f"step {before + 1}/": line in run.output(), timeout=600)
        run.kill(signal.SIGTERM)
        assert run.wait(600)[0] == 128 + signal.SIGTERM, run.output()
        nodes.revive(1)
    code, output = train(on(2)).wait(900)
    assert code == 0, output
    assert_history(tmp_path, steps)
    assert nodes.actors(0) == nodes.actors(1) == []


def node_of_engine(nodes, folder):
    """The number of the node that the engine's only replica is on."""
    pid = json.loads((folder / "runs/run/status.json").read_text())["workers"]["generation"][0]
    [number] = [number for number in range(3) if pid in {process.pid for process in nodes.processes(number)}]
    return number


def test_a_run_whose_engine_lost_its_node_in_any_phase_continues_on_another_one(start, slow_turns, tmp_path):
    config = holdable(slow_turns, tmp_path)
    nodes, train = start(3)
    changes = {
        "cluster": {"num_nodes": 1, "workers_per_node": 1, "cpus_per_worker": 1},
        "policy": {"generation": {"resources": {}, "refit_transport": "collective"}},
        "data": {"train": {"num_samples": 4_000}},
    }
    run = train(merged(config(100_000), changes))
    run.wait_for(checkpoint_of(1, tmp_path).exists, timeout=600)
    held = Held(run, tmp_path)
    for phase in PHASES:
        held.wait_in(phase)
        dying = node_of_engine(nodes, tmp_path)
        nodes.kill(dying)
        held.release()
        before = max(metrics_of(tmp_path))
        run.wait_for(lambda before=before: max(metrics_of(tmp_path)) > before + 2, timeout=900)
        nodes.revive(dying)
    run.kill(signal.SIGTERM)
    code, output = run.wait(600)
    assert code == 128 + signal.SIGTERM, output
    run.assert_gone()
    metrics = assert_history(tmp_path, max(metrics_of(tmp_path)))
    assert sum(row.get("generation/restarts", 0) for row in metrics.values()) >= len(PHASES)
    assert [nodes.actors(number) for number in range(3)] == [[], [], []]
