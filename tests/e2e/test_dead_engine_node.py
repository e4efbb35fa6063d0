"""An asynchronous run whose engine is alone on its node, which dies: the run waits for another node, and continues or ends."""

import signal

import psutil
import pytest
import ray
from e2e_runs import checkpoint_of, metrics_of
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("core/cluster/test_multi_node_cluster.py restarts a rank whose node died; these runs take minutes"),
    pytest.mark.timeout(1800),
]

QUIET = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}


@pytest.fixture
def nodes(no_ray, monkeypatch):
    """A Ray of two nodes on this machine with one declared CPU each; this process is on the first, which no test removes."""
    monkeypatch.setenv("RAY_worker_niceness", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **QUIET})
    made.add_node(num_cpus=1, include_log_monitor=False)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def run(nodes, train, tmp_path):
    """Starts a run without end with the policy on the first node and the engine on the second, which dies in a later step."""

    def start(transport, start_s):
        config = {
            "grpo": {"max_num_steps": 100_000},
            "policy": {
                "scheduler": {"kwargs": {"num_training_steps": None}},
                "generation": {"resources": {}, "refit_transport": transport},
            },
            "cluster": {"cpus_per_worker": 1, "use_gpus": False, "deadlines": {"start_s": start_s}},
            "loss_fn": {"ratio_to": "sampler"},
            "rollout": {"max_staleness": 2, "ahead": 2},
            "data": {"train": {"num_samples": 400_000}},
            "checkpointing": {"save_period": 3, "keep_latest_k": 2},
        }
        if transport == "disk":
            (tmp_path / "refits").mkdir()
            config["policy"]["generation"]["refit_folder"] = str(tmp_path / "refits")
        made = train(config, environment={"RAY_ADDRESS": nodes.address})
        made.wait_for(checkpoint_of(3, tmp_path).exists)
        [dying] = [node for node in nodes.list_all_nodes() if node is not nodes.head_node]
        nodes.remove_node(dying, allow_graceful=False)
        made.wait_for(lambda: [node["Alive"] for node in ray.nodes()].count(False) == 1)
        return made

    return start


def workers():
    """The processes of Ray's actors on this machine's nodes."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if process.name().startswith(("ray::ActorHost", "ray::rank"))]


def steps_of(folder):
    return max(metrics_of(folder), default=0)


@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_a_run_whose_engine_lost_its_node_continues_once_another_joins(run, nodes, tmp_path, transport):
    made = run(transport, 600.0)
    nodes.add_node(num_cpus=1, include_log_monitor=False)
    before = steps_of(tmp_path)
    made.wait_for(lambda: steps_of(tmp_path) > before + 5, timeout=900)
    made.kill(signal.SIGTERM)
    code, output = made.wait()
    assert code == 128 + signal.SIGTERM, output
    metrics = metrics_of(tmp_path)
    assert sum(row.get("generation/restarts", 0) for row in metrics.values()) >= 1
    assert max(row["staleness/steps_max"] for row in metrics.values() if "staleness/steps_max" in row) <= 2
    made.assert_gone()


def test_a_run_whose_engine_finds_no_other_node_ends_at_its_deadline_with_what_is_missing(run, tmp_path):
    made = run("collective", 100.0)
    code, output = made.wait(900)
    assert code == 1, output
    error = output[output.index("error: ") :]
    assert "It needs [{'CPU': 1.0}]. Ray has " in error
    assert error.count("with 1 CPUs (0 free)") == 1
    assert "add a node" in error
    assert "Traceback" not in error
    made.assert_gone()
    assert workers() == []
