"""`rlcore doctor --cluster` on simulated nodes: what would break a run is found and named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from network_nodes import SCRIPTS, make_nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("tests/cli/test_cluster_findings.py: what is concluded from the answers of nodes"),
]
MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
CONFIG = """
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 1}}
policy:
  backend: hf
  model_name: {model}
  max_total_sequence_length: 16
  generation: {{backend: hf, max_new_tokens: 4}}
data:
  train: {{dataset_name: arithmetic, num_samples: 8}}
env:
  arithmetic: {{num_workers: 1}}
cluster: {{num_nodes: 2, workers_per_node: {workers}}}
logger: {{log_dir: {runs}}}
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def nodes(shared):
    made = make_nodes(2, shared)
    try:
        made.start_ray(0)
        made.start_ray(1)
        yield made
    finally:
        made.close()


def doctor(nodes, *arguments, node=0, **environment):
    command = nodes.command(node, SCRIPTS / "rlcore", "doctor", "--cluster", "--timeout", "200", *arguments)
    own = nodes.environment(**environment)
    return subprocess.run(command, env=own, cwd=nodes.shared, capture_output=True, text=True, check=False)


def write_config(folder, *, model=MODEL, runs=None, workers=1):
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(model=model, runs=runs or folder / "runs", workers=workers))
    return path


def problems(result):
    return [(problem["node"], problem["check"], problem["text"]) for problem in json.loads(result.stdout)["problems"]]


def test_equal_nodes_pass_and_the_speed_between_them_is_measured(nodes, shared):
    result = doctor(nodes, write_config(shared), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["problems"] == []
    assert [node["report"]["host"] for node in found["nodes"]] == ["node1", "node2"]
    first, second = nodes.addresses
    assert [(row["from"], row["to"]) for row in found["mib_per_s"]] == [(first, second), (second, first)]
    assert all(row["value"] > 0 for row in found["mib_per_s"])
    assert list(shared.glob(".rlcore-doctor-*")) == []


def test_a_model_and_a_run_folder_that_only_one_node_sees_and_too_few_cpus_are_found(nodes, shared):
    private = Path("/tmp/only-here")
    nodes.run(0, "cp", "-r", MODEL, private)
    copy = Path("/tmp/model-of-each-node")
    for node in (0, 1):
        nodes.run(node, "cp", "-r", MODEL, copy)
    nodes.run(1, "sh", "-c", f"echo >> {copy}/config.json")
    config = write_config(shared, model=private, runs="/tmp/runs", workers=2)
    result = doctor(nodes, config, "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    second = nodes.addresses[1]
    found = problems(result)
    assert [(node, check) for node, check, _ in found] == [(second, "paths"), (second, "run folder"), ("", "resources")]
    assert f"policy.model_name: {private} does not exist" in found[0][2]
    assert "does not see what the driver writes" in found[1][2]
    assert "cluster: Asked for bundle_ct_per_node_list=[2, 2]" in found[2][2]
    table = doctor(nodes, write_config(shared, model=copy))
    assert table.returncode == 1
    assert f"ERROR  {second}: policy.model_name: {copy} has other content" in table.stdout


def test_a_node_with_another_version_of_a_plugin_is_found(nodes, shared):
    """The second node sees another version of `rl-envs` through its own mounts."""
    [metadata] = SCRIPTS.parent.glob("lib/python*/site-packages/rl_envs-*.dist-info")
    other = shared / "not-on-the-path" / metadata.name
    shutil.copytree(metadata, other)
    text = (other / "METADATA").read_text()
    (other / "METADATA").write_text(text.replace("\nVersion: ", "\nVersion: 9.", 1))
    nodes.run(1, "mount", "--bind", other, metadata)
    try:
        result = doctor(nodes, write_config(shared), "--json")
        assert result.returncode == 1, result.stdout + result.stderr
        [(node, check, message)] = problems(result)
    finally:
        nodes.run(1, "umount", metadata)
    assert (node, check) == (nodes.addresses[1], "versions")
    assert message.startswith("rl-envs 9.")


def test_a_firewall_is_found_with_its_direction(nodes, shared):
    """The first node may not connect to the ports of a rendezvous. Ray's own connections stay open."""
    rule = ["pref", "100", "ipproto", "tcp", "dport", "20000-32000", "prohibit"]
    nodes.run(0, "ip", "rule", "add", *rule)
    try:
        result = doctor(nodes, write_config(shared))
    finally:
        nodes.run(0, "ip", "rule", "del", *rule)
    assert result.returncode == 1, result.stdout + result.stderr
    first, second = nodes.addresses
    assert f"ERROR  {first}: {first} cannot send to {second}: " in result.stdout
    assert f"{second} cannot send" not in result.stdout


RANKS = """
from datetime import timedelta
from rl_core.cluster import RayVirtualCluster, RayWorkerGroup

class Rank:
    def __init__(self, context):
        import torch.distributed as dist
        from rl_backends_base.parallel import join_process_group
        join_process_group(context, "gloo", timeout=timedelta(seconds=120))
        self.dist = dist

    def total(self):
        import torch
        ones = torch.ones(())
        self.dist.all_reduce(ones)
        return float(ones)

with RayVirtualCluster([1, 1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Rank) as group:
    print("totals", group.run_all("total"), flush=True)
"""


def test_ranks_of_two_nodes_meet_although_their_host_names_have_no_address(nodes, shared):
    script = shared / "ranks.py"
    script.write_text(RANKS)
    command = nodes.command(0, sys.executable, script)
    done = subprocess.run(command, env=nodes.environment(), cwd=shared, capture_output=True, text=True, check=False)
    assert "totals [2.0, 2.0]" in done.stdout, done.stderr[-3000:]


def test_without_the_token_the_error_says_which_variables_to_set(nodes, shared):
    result = doctor(nodes, RAY_AUTH_MODE="disabled")
    assert result.returncode == 2
    assert "RAY_AUTH_TOKEN=<the same secret>" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_silent_address_and_a_machine_that_is_not_a_node_are_user_errors(nodes, shared):
    silent = doctor(nodes, RAY_ADDRESS=f"{nodes.addresses[0]}:1")
    assert silent.returncode == 2
    assert "Nothing answers at RAY_ADDRESS" in silent.stderr
    outside = nodes.outside(SCRIPTS / "rlcore", "doctor", "--cluster", "--timeout", "200")
    assert outside.returncode == 2
    assert "This machine is not one of its nodes" in outside.stderr
    assert "Traceback" not in silent.stderr + outside.stderr


def test_a_node_that_does_not_answer_is_named(nodes, shared):
    stopped = [process for process in nodes.processes(1) if process.name() == "raylet"]
    for process in stopped:
        process.suspend()
    try:
        result = doctor(nodes, "--timeout", "20", "--json")
    finally:
        for process in stopped:
            process.resume()
    assert result.returncode == 1, result.stdout + result.stderr
    [(node, check, message)] = problems(result)
    assert (node, check) == (nodes.addresses[1], "answer")
    assert "did not finish within" in message
