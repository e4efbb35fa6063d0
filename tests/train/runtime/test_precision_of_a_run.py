"""`policy.precision` by default: chosen once for the devices, recorded in the run folder, and kept by a resume."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from simulated_gpu import SimulatedGpu

from rl_core.config.schema import ClusterConfig
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.placement import make_cluster, resolve_precision
from rl_train.checkpoints.manifest import write_manifest
from rl_train.config.loader import load_config
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
SECTION = {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16}
RUN = {
    "sft": {"max_num_steps": 2, "global_batch_size": 2},
    "policy": SECTION,
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"save_period": 2},
}


def run_with(**sections):
    return load_config({**RUN, **sections}, registry=Registry(discover()), stages=()).run


def precisions(run):
    return {name: getattr(run, name).precision for name in ("policy", "value", "teacher") if getattr(run, name) is not None}


def test_it_is_float32_on_cpus():
    run = resolve_precision(run_with(), None)
    assert precisions(run) == {"policy": "bfloat16" if torch.cuda.is_available() else "float32"}


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_on_gpus_it_is_bfloat16_if_they_support_it(monkeypatch, supported, chosen):
    with SimulatedGpu().active():
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)
        run = run_with(teacher=SECTION)
        assert precisions(resolve_precision(run, None)) == {"policy": chosen, "teacher": chosen}
        given = run_with(policy={**SECTION, "precision": "float32"})
        assert resolve_precision(given, None) is given


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="expects GPUs that do not exist")
def test_each_gpu_of_a_cluster_is_asked(local_ray, monkeypatch):
    """The cluster says that it has GPUs, and its workers find none, so that they cannot confirm bfloat16."""
    with ExitStack() as exits:
        cluster = make_cluster(ClusterConfig(workers_per_node=2, use_gpus=False, cpus_per_worker=1), exits, groups=2)
        monkeypatch.setattr(cluster, "worker_share", lambda: {"num_cpus": 0.5, "num_gpus": 0.0})
        cluster.use_gpus = True
        assert precisions(resolve_precision(run_with(), cluster)) == {"policy": "float32"}
        # The probing workers have left: both groups of the run still fit.
        assert not cluster.tenants


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    launch(folder)
    return folder


def launch(folder, *overrides, **options):
    path = folder / "run.yaml"
    path.write_text(json.dumps({**RUN, "logger": {"log_dir": str(folder / "runs")}}))
    return train(path, overrides, console=False, **options)


@pytest.fixture
def again(finished, tmp_path):
    """Start again, in a copy of the finished run; changes its checkpoint's config first."""
    shutil.copytree(finished / "runs", tmp_path / "runs")

    def start(change, *overrides):
        checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000002"
        state = json.loads((checkpoint / "state.json").read_text())
        change(state["config"])
        (checkpoint / "state.json").write_text(json.dumps(state))
        write_manifest(checkpoint, step=2, metrics={})
        launch(tmp_path, "sft.max_num_steps=3", *overrides)
        return recorded(tmp_path)

    return start


def recorded(folder):
    run = folder / "runs" / "run"
    states = sorted((run / "checkpoints").glob("step_*/state.json"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config["policy"]["precision"], json.loads(states[-1].read_text())["config"]["policy"]["precision"]


def test_the_choice_is_recorded_in_the_run_folder_and_in_its_checkpoints(finished):
    assert recorded(finished) == ("float32", "float32")


def test_a_resume_keeps_the_precision_of_its_checkpoint_unless_the_config_sets_another(again):
    def in_bfloat16(config):
        config["policy"]["precision"] = "bfloat16"

    assert again(in_bfloat16) == ("bfloat16", "bfloat16")


def test_a_checkpoint_without_keys_that_were_added_later_resumes_without_confirmation(again):
    def of_an_earlier_version(config):
        for section, key in ((config["policy"], "precision"), (config["policy"]["hf_cfg"], "reference"), (config, "rollout")):
            del section[key]

    assert again(of_an_earlier_version) == ("float32", "float32")
