"""What `rlcore doctor --cluster` concludes from the answers of nodes; test_cluster_doctor.py runs it on simulated nodes."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import rlcore

from rl_core.cluster.placement import Node
from rl_core.cluster.ray_runtime import RayLease
from rl_core.config.section import ResourcesConfig
from rl_core.errors import DeadlineExceededError, UserError
from rl_core.rendezvous.interfaces import free_port
from rlcore_cli.cluster_check.command import findings_of
from rlcore_cli.cluster_check.nodes import NodeProbe, Questions, Survey, digest, questions_of, report

ADDITION = Path(__file__).parents[2] / "examples" / "grpo_addition.yaml"
FIRST, SECOND = "10.0.0.1", "10.0.0.2"


def node(address):
    return Node(node_id=address, address=address, cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return report([str(tmp_path_factory.mktemp("model"))])


@pytest.fixture
def questions(here):
    [model] = here.inputs
    return Questions(inputs={"policy.model_name": model}, outputs={"logger.log_dir": "/runs"})


def survey(here, second, **others):
    nodes = {FIRST: node(FIRST), SECOND: node(SECOND)}
    healthy = {"skews": {FIRST: 0.0, SECOND: 0.0}, "shared": {"/runs": {}}, "mib_per_s": {(FIRST, SECOND): 100.0}}
    return Survey(here=here, nodes=nodes, reports={FIRST: here, SECOND: second}, **{**healthy, **others})


def checks(found):
    return [(finding.subject, finding.check, finding.status) for finding in found]


def test_equal_nodes_have_no_problem(here, questions):
    assert findings_of(survey(here, here), questions) == []


def test_differences_of_a_node_are_named_with_what_to_do(here, questions):
    versions = {**here.versions, "rl-envs": "9.9"}
    versions.pop("torch")
    plugins = {**here.plugins, "hf": "failed"}
    other = replace(here, python="3.10.1", versions=versions, plugins=plugins, inputs=dict.fromkeys(here.inputs))
    found = findings_of(survey(here, other), questions)
    assert checks(found) == [(SECOND, name, "error") for name in ("Python", "versions", "versions", "plugins", "paths")]
    texts = [finding.text for finding in found]
    assert (
        texts[1] == f"rl-envs 9.9 instead of {here.versions['rl-envs']}: pip install rl-envs=={here.versions['rl-envs']} there."
    )
    assert texts[2].startswith(f"torch {here.versions['torch']} is not installed")
    assert "rlcore doctor hf" in texts[3]
    assert "does not exist" in texts[4]


def test_data_that_only_the_driver_reads_and_clocks_are_warnings(here, questions):
    [model] = here.inputs
    data = replace(questions, inputs={"data.train.path": model})
    found = findings_of(survey(here, replace(here, inputs={model: "other"}), skews={SECOND: -60.0}), data)
    assert checks(found) == [(SECOND, "paths", "warning"), (SECOND, "clock", "warning")]
    assert "60 s behind" in found[1].text


def test_nodes_that_do_not_answer_or_connect_or_share_and_too_few_cpus_are_errors(here, questions):
    wide = replace(questions, workers={"cluster": ResourcesConfig(num_nodes=2, workers_per_node=8)})
    asked = survey(
        here,
        DeadlineExceededError("build did not finish within 60 s"),
        shared={"/runs": {SECOND: "cannot write there (Read-only file system)"}},
        mib_per_s={(FIRST, SECOND): "timed out"},
    )
    found = findings_of(asked, wide)
    assert checks(found) == [
        (SECOND, "answer", "error"),
        (SECOND, "run folder", "error"),
        (FIRST, "network", "error"),
        ("", "resources", "error"),
    ]
    assert "Ray has 2 nodes" in found[3].text


def test_probes_measure_connections_and_name_a_closed_port():
    ports = [free_port("127.0.0.1") for _ in range(3)]
    speeds = {}

    def exchange(own, peer):
        speeds[own] = NodeProbe().exchange(ports[own], ("127.0.0.1", ports[peer]), 1, 60.0)

    second = threading.Thread(target=exchange, args=(1, 0))
    second.start()
    exchange(0, 1)
    second.join()
    assert speeds[0] > 0
    assert speeds[1] > 0
    assert "refused" in NodeProbe().exchange(ports[0], ("127.0.0.1", ports[2]), 1, 0.1)


def test_the_digest_of_a_folder_depends_on_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    first = digest(tmp_path)
    (tmp_path / "a").write_text("2")
    second = digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, digest(tmp_path)}) == 3
    assert digest(tmp_path / "a") is None


def test_without_a_cluster_or_with_a_silent_address_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    unset = rlcore("doctor", "--cluster")
    assert unset.returncode == 2
    assert "RAY_ADDRESS is not set" in unset.stderr
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port('127.0.0.1')}")
    silent = rlcore("doctor", "--cluster")
    assert silent.returncode == 2
    assert "Nothing answers at RAY_ADDRESS" in silent.stderr
    assert rlcore("doctor", "--json").returncode == 2
    with pytest.raises(UserError, match="Nothing answers at RAY_ADDRESS"):
        RayLease()  # a run, which Ray would let wait for minutes
    several = rlcore("doctor", "hf", "++cluster.num_nodes=2")
    assert several.returncode == 2
    assert "need --cluster" in several.stderr


def test_the_overrides_of_the_run_apply_to_the_checks(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"defaults: {ADDITION}\n")
    asked = questions_of(config, ["++cluster.num_nodes=2", "++cluster.workers_per_node=8", "logger.log_dir=/shared/runs"])
    workers = asked.workers["cluster"]
    assert (workers.num_nodes, workers.workers_per_node) == (2, 8)
    assert asked.outputs["logger.log_dir"] == "/shared/runs"


def test_workers_use_gpus_if_a_node_has_some_and_the_engine_those_of_the_policy(here, questions):
    workers = {"cluster": ResourcesConfig(num_nodes=2), "policy.generation.resources": ResourcesConfig(workers_per_node=3)}
    asked = survey(here, here)
    nodes = {name: replace(node, gpus=2.0, free_gpus=2.0) for name, node in asked.nodes.items()}
    [found] = findings_of(replace(asked, nodes=nodes), replace(questions, workers=workers))
    assert found.check == "resources"
    assert "policy.generation.resources: Asked for bundle_ct_per_node_list=[3]: 3 bundles of 1 CPU and 1 GPU" in found.text
