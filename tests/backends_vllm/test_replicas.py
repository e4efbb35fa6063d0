"""vLLM replicas on a real Ray cluster: tensor parallelism, weights over a collective, and a dying replica."""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny_models import LENGTH, VOCABULARY, make_model, plain_logprobs, rows, sampled_logprobs, take_step
from transformers import AutoModelForCausalLM, LlamaConfig

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import WorkerError
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import CollectiveTransport, SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TRANSPORTS = {"shared_memory": SharedMemoryTransport, "collective": CollectiveTransport}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("replicas") / "model", "qwen2")


@pytest.fixture(scope="module")
def cluster():
    with RayVirtualCluster([2], max_colocated_worker_groups=2, cpus_per_bundle=1) as cluster:
        yield cluster


def section(path, **cfg):
    return VllmConfig(
        model_name=path,
        temperature=0.8,
        max_new_tokens=16,
        vllm_cfg={"precision": "float32", "max_model_len": LENGTH, "max_num_seqs": 16, "load_format": "dummy", **cfg},
    )


def make_policy(path, cluster, generation=None, **fields):
    return HuggingFacePolicy(
        config=HFPolicyConfig(
            model_name=path,
            max_total_sequence_length=LENGTH,
            generation=generation or section(path),
            optimizer=OptimizerConfig(kwargs={"lr": 5e-3, "weight_decay": 0.0}),
            **fields,
        ),
        cluster=cluster,
        num_workers=1,
    )


def synchronizer(policy, engine, cluster, name="shared_memory"):
    return WeightSynchronizer(
        policy,
        engine,
        WeightSender(
            policy,
            TRANSPORTS[name],
            buffer_bytes=64 * 1024,
            num_receivers=engine.num_workers,
            wait=wait_together,
            rendezvous=cluster.get_master_address_and_port,
            digests_are_held=False,
        ),
        canary=RefitCanary(
            lambda: make_canary(range(3, VOCABULARY), num_receivers=engine.num_workers, max_length=LENGTH, exact=True)
        ),
    )


def agrees_with_plain(policy, output, folder):
    policy.save_checkpoint(str(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(sampled_logprobs(output), plain_logprobs(plain, output), atol=1e-5, rtol=0)


def family_of(engine):
    """The process of the first replica and all its descendants, vLLM's processes last."""
    worker = psutil.Process(engine.group.pids()[0])
    return sorted([worker, *worker.children(recursive=True)], key=lambda one: "spawn_main" in " ".join(one.cmdline()))


def held_by(processes):
    """Shared memory and temporary files that they have mapped, opened or bound, except Ray's.

    Libraries that they have mapped do not count, wherever they are installed.
    """
    found = set()
    for process in processes:
        found.update(mapped.path for mapped in process.memory_maps())
        found.update(opened.path for opened in process.open_files())
        found.update(bound.laddr for bound in process.net_connections("unix"))
    places = ("/dev/shm/", tempfile.gettempdir())
    own = {path for path in found if path.startswith(places) and not path.startswith(sys.prefix)}
    return {Path(path) for path in own if "session_" not in path and "plasma" not in path}


def lives(process):
    """Whether the process exists and is not a zombie that its parent has yet to reap."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def folders_of(pid):
    return list(Path(tempfile.gettempdir()).glob(f"rlcore-vllm-{pid}-*"))


def test_two_tensor_parallel_processes_take_every_refit_over_both_transports(path, cluster, tmp_path):
    # Qwen2's one KV head cannot be split, so vLLM gives each process a copy of it: the hardest case of a fused weight.
    policy = make_policy(path, cluster)
    engine = VllmGeneration(cluster, section(path, tensor_parallel_size=2))
    assert (engine.group.world_size, engine.num_workers) == (1, 2)
    pids = [*policy.group.pids(), *engine.group.pids()]
    try:
        for step, name in enumerate(("shared_memory", "collective", "collective"), 1):
            take_step(policy, step)
            assert synchronizer(policy, engine, cluster, name).sync()["refit/canary_error"] < 1e-5
            output = engine.generate(rows(step))
            assert output["weight_version"].tolist() == [step] * 6
            agrees_with_plain(policy, output, tmp_path / str(step))
        processes = family_of(engine)
        held = held_by(processes)
        assert folders_of(processes[0].pid), "its sockets lie in a folder of its own"
        log = Path(engine.group._actors[0].identity.log_file)
    finally:
        engine.shutdown()
        policy.shutdown()
    # They end regularly, without messages about names that no longer exist.
    assert_nothing_is_left(held, pids, processes)
    assert not re.findall(r"Traceback|Exception ignored|resource_tracker|leaked", log.read_text())


def assert_nothing_is_left(held, pids, processes):
    assert any(path.name.startswith("psm_") for path in held), "vLLM's queues are among what is looked at"
    assert not [path for path in held if path.exists()]
    assert not [folder for pid in pids for folder in folders_of(pid)]
    assert not [page for pid in pids for page in Path("/dev/shm").glob(f"*[-_]{pid}[-_]*")]
    assert not [process for process in processes if lives(process)]


@pytest.mark.full(
    "backends_base/dispatch/test_revival.py replaces dead replicas; test_device.py removes what dead processes have left"
)
@pytest.mark.parametrize("killed", ["one of vLLM's processes", "all at once"])
def test_a_tensor_parallel_replica_that_is_killed_is_replaced_and_leaves_nothing(path, cluster, killed):
    engine = VllmGeneration(cluster, section(path, tensor_parallel_size=2, load_format="auto"))
    try:
        undisturbed = engine.generate(rows(9))
        first = family_of(engine)
        held, pids = held_by(first), engine.group.pids()
        # The end of one process is the end of the replica; if all are killed, no process is left to clean up.
        for process in first if killed == "all at once" else first[-1:]:
            process.kill()
        again = engine.generate(rows(9))
        assert engine.restarts == 1
        assert torch.equal(again["output_ids"], undisturbed["output_ids"])
        second = family_of(engine)
        held |= held_by(second)
        pids += engine.group.pids()
    finally:
        engine.shutdown()
    assert_nothing_is_left(held, pids, [*first, *second])


@pytest.mark.full(
    "backends_base/dispatch/test_revival.py and core/weights/test_revival_in_refit.py kill workers in the same places"
)
def test_a_replica_that_is_killed_in_a_step_or_in_a_refit_comes_back_and_nothing_is_lost(path, cluster):
    policy, engine = make_policy(path, cluster), VllmGeneration(cluster, section(path))
    assert engine.group.world_size == 2
    try:
        take_step(policy, 1)
        sync = synchronizer(policy, engine, cluster)
        sync.sync()
        undisturbed = engine.generate(rows(3, count=12))
        os.kill(engine.group.pids()[0], signal.SIGKILL)
        again = engine.generate(rows(3, count=12))
        assert engine.restarts == 1
        for key, column in undisturbed.items():
            torch.testing.assert_close(again[key], column, atol=1e-5, rtol=0)

        take_step(policy, 2)
        victim = engine.group.pids()[1]
        stopped = threading.Thread(target=kill_when_it_computes, args=(victim,))
        stopped.start()
        found = sync.sync()
        stopped.join()
        assert found["refit/canary_error"] < 1e-5
        assert engine.generate(rows(4))["weight_version"].tolist() == [2] * 6
    finally:
        engine.shutdown()
        policy.shutdown()


@pytest.mark.full("test_engine_death.py kills the core of an engine in this process")
def test_an_engine_core_that_is_killed_while_idle_or_in_a_refit_is_replaced_with_its_replica(path, cluster):
    policy, engine = make_policy(path, cluster), VllmGeneration(cluster, section(path, async_engine=True))
    try:
        take_step(policy, 1)
        sync = synchronizer(policy, engine, cluster)
        sync.sync()
        undisturbed = engine.generate(rows(3, count=12))
        family_of(engine)[-1].kill()
        again = engine.generate(rows(3, count=12))
        assert engine.restarts == 1
        assert torch.equal(again["output_ids"], undisturbed["output_ids"])

        take_step(policy, 2)
        stopped = threading.Thread(target=kill_when_it_computes, args=(family_of(engine)[-1].pid,))
        stopped.start()
        assert sync.sync()["refit/canary_error"] < 1e-5
        stopped.join()
        assert engine.generate(rows(4))["weight_version"].tolist() == [2] * 6
        assert engine.restarts == 2
    finally:
        engine.shutdown()
        policy.shutdown()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_replica_that_is_killed_comes_back_with_frozen_weights_and_adapter(path, cluster, name):
    adapted = section(path, max_lora_rank=8).model_copy(update={"lora": "adapter"})
    policy = make_policy(path, cluster, generation=adapted, precision="float32", hf_cfg={"lora": {"rank": 4, "alpha": 64}})
    engine = VllmGeneration(cluster, adapted)
    try:
        sync = synchronizer(policy, engine, cluster, name)
        sizes = []
        for step in (1, 2):
            take_step(policy, step)
            sizes.append(sync.sync()["refit/bytes"])
        assert sizes[1] < sizes[0] / 5, "only adapters are sent"
        undisturbed = engine.generate(rows(3, count=12))
        os.kill(engine.group.pids()[0], signal.SIGKILL)
        again = engine.generate(rows(3, count=12))
        assert engine.restarts == 1
        torch.testing.assert_close(again["logprobs"], undisturbed["logprobs"], atol=1e-5, rtol=0)
        take_step(policy, 3)
        assert sync.sync()["refit/canary_error"] < 1e-5
        assert engine.generate(rows(4))["weight_version"].tolist() == [3] * 6
    finally:
        engine.shutdown()
        policy.shutdown()


def kill_when_it_computes(pid):
    """At a random moment of the refit, during any call."""
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


def test_settings_unsupported_by_vllm_on_a_cpu_are_errors_with_a_fix(path, tmp_path):
    with pytest.raises(WorkerError, match="pipeline_parallel_size: 1") as caught:
        VllmGeneration(config=section(path, pipeline_parallel_size=2)).wait_ready()
    assert caught.value.exit_code == 2
    small_heads = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, vocab_size=64)
    small_heads.save_pretrained(tmp_path)
    with pytest.raises(WorkerError, match=r"this model's is 16. Set policy.generation.backend: hf") as caught:
        VllmGeneration(config=section(str(tmp_path))).wait_ready()
    assert caught.value.exit_code == 2
