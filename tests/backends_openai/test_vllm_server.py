"""Training against vLLM's own server on a CPU, started with the printed command."""

import json
import shlex
import sys
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from openai_servers import LEARNING, LEARNING_STEPS, MODEL, assert_learned, engine_of, prompts
from vllm_servers import vllm_server

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.errors import WeightSyncError
from rl_core.http import HttpError
from rl_core.rendezvous.interfaces import free_port
from rl_serve.weights_api import EXTENSION, UpdateOptions, vllm_command
from rl_train.launch.train import train
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import DiskTransport

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full("starts vLLM's server, which takes half a minute"),
]
FORGETFUL = """
from rl_backends_vllm.refit import VllmWeightReceiver
from rl_backends_vllm.refit import ServerWeights

repack, is_stale = VllmWeightReceiver._repack_tied_heads, VllmWeightReceiver._is_stale

class Forgetful(ServerWeights):
    def forget(self, what):
        VllmWeightReceiver._repack_tied_heads = repack if what == "nothing" else lambda self: None
        VllmWeightReceiver._is_stale = (lambda self, module: False) if what == "head and check" else is_stale
        return "{}"
"""
"""An extension that can leave the packed output layer as it is, as vLLM's own reload does, and also skip the check for it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of the server, and the folder of its weights."""
    folder = tmp_path_factory.mktemp("updates")
    modules = tmp_path_factory.mktemp("modules")
    (modules / "forgetful.py").write_text(FORGETFUL)
    port = free_port("127.0.0.1")
    command = vllm_command(
        str(MODEL),
        updates=UpdateOptions(folder=folder.resolve(), admin_key=""),
        name="addition",
        host="127.0.0.1",
        port=port,
        refused={},
        device="cpu",
    )
    command = command.replace(EXTENSION, "forgetful.Forgetful").replace(" python ", f" {shlex.quote(sys.executable)} ")
    command += " --dtype float32 --max-model-len 64 --max-num-seqs 64"
    with vllm_server(command, port, folder.parent / "server.log", modules=[modules]):
        yield f"http://127.0.0.1:{port}", folder


def call(url, method, *arguments):
    body = json.dumps({"method": method, "args": arguments}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    with closing(urllib.request.urlopen(request, timeout=60)) as response:
        [answer] = json.loads(response.read())["results"]
    return json.loads(answer)


@contextmanager
def syncing(server, **keys):
    """A policy, an engine connected to the server, and their synchronizer with a canary."""
    url, folder = server
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=str(MODEL), max_total_sequence_length=32))
    own = {"weight_updates": "vllm", "refit_folder": str(folder), "max_retries": 2, **keys}
    try:
        with engine_of(url, model="addition", **own) as engine:
            yield (
                policy,
                engine,
                WeightSynchronizer(
                    policy,
                    engine,
                    WeightSender(policy, DiskTransport, folder=folder, digests_are_held=False),
                    canary=RefitCanary(lambda: make_canary(range(4, 16), num_receivers=1, max_length=32, exact=True)),
                ),
            )
    finally:
        policy.shutdown()


def shift(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, tensor in policy.group.worker.iter_weights():
            tensor.add_(0.05 * torch.randn_like(tensor))


@pytest.mark.parametrize("api", ["completions", "inference"])
def test_weights_reach_the_server_and_a_stale_tied_head_is_caught(server, api):
    url, _ = server
    with syncing(server, api=api) as (policy, engine, sync):
        shift(policy, seed=1)
        metrics = sync.sync()
        assert metrics["refit/canary_error"] < 1e-3
        assert engine.weight_version == policy.weight_version == 0
        assert engine.weight_fingerprint() == policy.weight_fingerprint()
        assert engine.generate(prompts([4, 5, 13, 6, 16]))["weight_version"].tolist() == [0]

        shift(policy, seed=2)
        for forgotten, reason in (
            ("head", "still uses packed weights from before the refit in lm_head"),
            ("head and check", "computes log-probabilities that differ from the policy's"),
        ):
            assert call(url, "forget", forgotten) == {}
            with pytest.raises(WeightSyncError, match=reason):
                sync.sync()
        assert call(url, "forget", "nothing") == {}
        assert sync.sync()["refit/canary_error"] < 1e-3


def test_the_server_samples_again_after_it_refused_the_weights_of_another_model(server):
    with syncing(server) as (policy, engine, _):
        weights = dict(policy.prepare_refit_info())
        name = next(iter(weights))
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            engine.prepare_refit_info({**weights, name: ((1, 2), "float32")})
        assert engine.generate(prompts([4, 5, 13, 6, 16]))["generation_lengths"].tolist()[0] > 0


def test_files_outside_of_the_folder_and_changed_files_are_refused(server):
    url, folder = server
    (folder / "link.safetensors").symlink_to(MODEL / "model.safetensors")
    (folder / "own.safetensors").write_bytes(b"changed")
    for name, reason in (
        ("../x.safetensors", "without `..`"),
        (str(MODEL / "model.safetensors"), "is not the relative path"),
        ("link.safetensors", "symbolic links are not allowed"),
        ("own.safetensors", "differs from the file that was written"),
    ):
        assert reason in call(url, "rlcore_update", name, "r", "1", "0" * 32)["error"]


def test_a_server_without_the_scale_out_endpoint_or_log_probabilities_is_refused_by_its_own_answers(server):
    url, _ = server
    with pytest.raises(HttpError, match=r"status 4\d\d"), engine_of(url, model="addition", stop_token_ids=[-5]):
        pass


def test_the_held_out_success_of_a_model_trained_with_the_server_of_vllm_rises(server, tmp_path):
    url, folder = server
    config = {
        "defaults": str(MODEL.parents[1] / "grpo_addition.yaml"),
        "grpo": {"max_num_steps": LEARNING_STEPS, "val_at_start": True, "val_at_end": True, "val_period": 0},
        "policy": {
            "generation": {
                "backend": "openai",
                "refit_folder": str(folder),
                "openai_cfg": {"base_url": f"{url}/v1", "model": "addition", "weight_updates": "vllm", "api": "inference"},
            }
        },
        "cluster": {"backend": "in_process", "workers_per_node": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    run = train(path, [f"logger.log_dir={tmp_path}", "logger.run_name=run", *LEARNING], console=False).folder
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [row["refit/weight_version"] for row in rows if "refit/weight_version" in row][:2] == [0.0, 1.0]
    assert_learned(rows)
