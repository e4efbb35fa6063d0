"""An engine with its own resources: its bundles, devices and transports, on a Ray of two simulated nodes with declared GPUs."""

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rl_core.cluster import RayWorkerGroup
from rl_core.errors import ResourceInsufficientError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.placement import make_cluster, make_engine_cluster, transports_between
from rl_train.assembly.run_assembly import plan_policy_and_engine
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Use
from rl_train.logprob_agreement import compare_log_probabilities

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture(scope="module")
def nodes(no_ray):
    """Two nodes on this machine, each with 24 declared CPUs and 8 declared GPUs, none of which is used for computing."""
    quiet = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 24, "num_gpus": 8, **quiet})
        made.add_node(num_cpus=24, num_gpus=8, include_log_monitor=False)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def config_file(folder, *, cluster, **generation):
    path = folder / "config.yaml"
    given = {"backend": "hf", "max_new_tokens": 5, **generation}
    sections = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 2},
        "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16, "generation": given},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8}},
        "env": {"arithmetic": {"num_workers": 1}},
        "cluster": cluster,
        "checkpointing": {"enabled": False},
    }
    path.write_text(json.dumps(sections))
    return path


@contextmanager
def placed(folder, *, cluster, resources=None):
    """The bundles of policy and engine."""
    path = config_file(folder, cluster=cluster, **({} if resources is None else {"resources": resources}))
    run = load_config(path, [], registry=Registry(discover()), use=Use.COMPARE).run
    with ExitStack() as exits:
        policy = make_cluster(run.cluster, exits, groups=2 if resources is None else 1)
        yield policy, make_engine_cluster(run, policy, exits)


def on_nodes(cluster):
    """The number of bundles on each node."""
    names = [bundle.node.node_id for bundle in cluster.bundles]
    return {name: names.count(name) for name in names}


SCENARIOS = {
    # Cluster and resources of the engine; bundles on the nodes of policy and engine; whether they share them; transports.
    "a: one GPU, colocated": ({"workers_per_node": 1}, None, [1], [1], ("shared_memory", "collective")),
    "b: eight GPUs, colocated": ({"workers_per_node": 8}, None, [8], [8], ("shared_memory", "collective")),
    "c: separate GPUs": ({"workers_per_node": 4}, {"workers_per_node": 4}, [4], [4], ("collective",)),
    "d: two nodes, colocated": ({"workers_per_node": 8, "num_nodes": 2}, None, [8, 8], [8, 8], ("shared_memory", "collective")),
    "d: a node each": ({"workers_per_node": 8}, {"workers_per_node": 8}, [8], [8], ("collective",)),
    "d: two nodes each": (
        {"workers_per_node": 5, "num_nodes": 2},
        {"workers_per_node": 3, "num_nodes": 2},
        [5, 5],
        [3, 3],
        ("collective",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SCENARIOS)
def test_bundles_and_transports_of_policy_and_engine_on_gpus(nodes, tmp_path, case):
    cluster, resources, policy_bundles, engine_bundles, transports = SCENARIOS[case]
    with placed(tmp_path, cluster={"use_gpus": True, "cpus_per_worker": 1, **cluster}, resources=resources) as (policy, engine):
        assert (policy is engine) == (resources is None)
        assert list(on_nodes(policy).values()) == policy_bundles
        assert list(on_nodes(engine).values()) == engine_bundles
        assert engine.use_gpus
        assert engine.worker_share()["num_gpus"] == (0.5 if resources is None else 1.0)
        assert transports_between(policy, engine) == transports
        if case == "d: a node each":
            assert not on_nodes(policy).keys() & on_nodes(engine).keys()


def test_on_cpus_shared_memory_reaches_an_engine_on_the_same_node_only(nodes, tmp_path):
    on_cpus = {"use_gpus": False, "cpus_per_worker": 1}
    one_node = {"cluster": {**on_cpus, "workers_per_node": 20}, "resources": {"cpus_per_worker": 24}}
    with placed(tmp_path, **one_node) as (policy, engine):
        assert not on_nodes(policy).keys() & on_nodes(engine).keys()
        assert transports_between(policy, engine) == ("collective",)
        assert [engine.threads_of(bundle) for bundle in engine.bundles] == [24]
        assert transports_between(policy, policy) == ("shared_memory", "collective")
    with placed(tmp_path, cluster={**on_cpus, "use_gpus": True}, resources={"use_gpus": False}) as (policy, engine):
        assert (policy.use_gpus, engine.use_gpus) == (True, False)
        assert transports_between(policy, engine) == ("collective",)


def test_an_engine_that_does_not_fit_next_to_the_policy_is_an_error(nodes, tmp_path):
    gpus = {"use_gpus": True, "cpus_per_worker": 1, "workers_per_node": 6, "num_nodes": 2}
    with (
        pytest.raises(ResourceInsufficientError, match=r"(?s)4 bundles.*the missing resources are in use"),
        placed(tmp_path, cluster=gpus, resources={"workers_per_node": 4}),
    ):
        pass


class Device:
    """Returns the place of a worker."""

    def __init__(self, context):
        self.context = context

    def place(self):
        import os

        return self.context.node_rank, self.context.local_rank, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.full("the bundles and their shares are checked above; test_multi_node_cluster.py has workers on two nodes")
def test_workers_of_policy_and_engine_see_different_gpus_of_a_node(nodes, tmp_path):
    sections = {
        "cluster": {"use_gpus": True, "cpus_per_worker": 1, "workers_per_node": 8},
        "resources": {"workers_per_node": 2},
    }
    with placed(tmp_path, **sections) as (policy, engine), RayWorkerGroup(policy, Device) as one:
        assert [place[:2] for place in one.run_all("place")] == [(0, rank) for rank in range(8)]
        assert sorted(place[2] for place in one.run_all("place")) == [str(gpu) for gpu in range(8)]
        with RayWorkerGroup(engine, Device) as other:
            assert [place[:2] for place in other.run_all("place")] == [(0, 0), (0, 1)]
            assert len({place[2] for place in other.run_all("place")}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_weights_reach_an_engine_on_another_node(nodes, tmp_path, transport):
    disk = {"refit_transport": "disk", "refit_folder": str(tmp_path)} if transport == "disk" else {}
    # The policy leaves less of its node free than the engine needs, so that the engine is on the other one.
    policy = {"use_gpus": False, "cpus_per_worker": 1, "workers_per_node": 1}
    path = config_file(tmp_path, cluster=policy, resources={"cpus_per_worker": 24}, **disk)
    plan = plan_policy_and_engine([str(path)], ["policy.generation.hf_cfg.precision=float32"], num_prompts=4)
    with plan.started() as pair:
        assert pair.refit == transport
        assert node_of(pair.policy) != node_of(pair.generation)
        assert pair.generation.num_workers == 1
        # Both compute in float32: 0.001 nats is the tolerance of every refit.
        assert compare_log_probabilities(pair.policy, pair.generation, plan.prompts.batch).mean_abs_difference < 1e-3


def node_of(facade):
    [actor] = facade.group._actors
    return actor.identity.node_id


REFUSED = {
    "num_workers": ({"num_workers": 2}, {}, "policy.generation.num_workers: is determined by policy.generation.resources"),
    "one process": (
        {},
        {"backend": "in_process"},
        "policy.generation.resources: is not supported with cluster.backend: in_",
    ),
    "memory of GPUs": (
        {"refit_transport": "shared_memory"},
        {"use_gpus": True},
        "policy.generation.refit_transport: shared_memory needs policy and engine on the same GPUs",
    ),
    "disk without a folder": (
        {"refit_transport": "disk"},
        {},
        "is required with refit_transport: disk and policy.generation.resources",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_own_resources_are_refused_with_the_reason(rlcore, tmp_path, case):
    generation, cluster, reason = REFUSED[case]
    path = config_file(tmp_path, cluster=cluster, resources={}, **generation)
    code, output = rlcore("validate", str(path), folder=tmp_path)
    assert code == 2, output
    assert reason in " ".join(output.split())
