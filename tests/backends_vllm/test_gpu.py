"""On a GPU: weights by CUDA IPC, and an engine that sleeps while its policy trains on the same device."""

import subprocess
from contextlib import contextmanager

import pytest
import torch
from tiny_models import take_step
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import OptimizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WorkerError
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH, VOCABULARY = 512, 151_936
MIB_OF_CACHE = 4096


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Half a billion random parameters, in the shape of Qwen2.5-0.5B."""
    folder = tmp_path_factory.mktemp("gpu") / "model"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def used_mib():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def section(path, *, temperature=1.0, **vllm_cfg):
    return VllmConfig(
        model_name=path,
        max_new_tokens=32,
        temperature=temperature,
        vllm_cfg={
            "precision": "bfloat16",
            "max_model_len": LENGTH,
            "load_format": "dummy",
            "kv_cache_gib": MIB_OF_CACHE / 1024,
            "gpu_memory_utilization": 0.3,
            "enforce_eager": True,
            **vllm_cfg,
        },
    )


@contextmanager
def running(path, own, *, gpus=1, greedy=False):
    """Engine, policy and synchronizer; the engine is created first because it measures free memory."""
    with RayVirtualCluster([gpus], use_gpus=True, max_colocated_worker_groups=2) as cluster:
        engine = VllmGeneration(cluster, own)
        engine.finish_generation()
        policy = HuggingFacePolicy(
            config=HFPolicyConfig(
                model_name=path,
                precision="bfloat16",
                max_total_sequence_length=LENGTH,
                generation=own,
                optimizer=OptimizerConfig(kwargs={"lr": 1e-4, "weight_decay": 0.0}),
            ),
            cluster=cluster,
        )
        sync = WeightSynchronizer(
            policy,
            engine,
            WeightSender(policy, SharedMemoryTransport, wait=wait_together, digests_are_held=False),
            canary=RefitCanary(
                lambda: make_canary(range(3, VOCABULARY), num_receivers=1, max_length=LENGTH, exact=False, greedy=greedy)
            ),
        )
        try:
            yield engine, policy, sync
        finally:
            engine.shutdown()
            policy.shutdown()


def prompts():
    generator = torch.Generator().manual_seed(1)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, VOCABULARY, (16, 64), generator=generator),
            "input_lengths": torch.full((16,), 64),
            "sample_seeds": torch.arange(16),
        }
    )


@pytest.mark.parametrize("level", [1, 2])
def test_a_policy_and_a_sleeping_engine_share_a_gpu_and_every_refit_by_cuda_ipc_is_proven(path, level):
    with running(path, section(path, sleep_level=level)) as (engine, policy, sync):
        for step in (1, 2):
            take_step(policy, step)
            found = sync.sync()
            assert found["refit/canary_error"] < 0.1
            assert step == 1 or found["refit/push_s"] < 1.0, "a gigabyte within a GPU"
            output = engine.generate(prompts())
            assert output["weight_version"].tolist() == [step] * 16
            awake = used_mib()
            engine.finish_generation()
            # The weights go to the host (1) or are dropped (2); the cache is dropped.
            assert used_mib() < awake - MIB_OF_CACHE * 0.9
            if level == 1:
                assert torch.equal(engine.generate(prompts())["output_ids"], output["output_ids"]), "it wakes by itself"
                engine.finish_generation()
            else:
                assert engine.weight_version == -1
                with pytest.raises(WorkerError, match="does not have complete weights"):
                    engine.generate(prompts())
                engine.finish_generation()


def test_memory_offloaded_by_the_policy_is_free_for_the_engine(path):
    with running(path, section(path)) as (_, policy, sync):
        take_step(policy, 1)
        training = used_mib()
        sync.sync()
        # Half a billion parameters: two bytes of weights, four of a copy and eight of moments each, less what a refit leaves.
        assert used_mib() < training - 14 * 494 * 0.6


@pytest.mark.parametrize("greedy", [False, True])
def test_log_probabilities_at_a_temperature_are_those_of_the_policy(path, greedy):
    with running(path, section(path, temperature=0.7), greedy=greedy) as (_, policy, sync):
        take_step(policy, 1)
        assert sync.sync()["refit/canary_error"] < 0.1


@pytest.mark.parametrize("settings", [{"async_engine": True, "sleep_level": 1}, {"enforce_eager": False}], ids=str)
def test_an_asynchronous_engine_and_one_with_graphs_take_weights_too(path, settings):
    with running(path, section(path, **settings)) as (engine, policy, sync):
        for step in (1, 2):
            take_step(policy, step)
            assert sync.sync()["refit/canary_error"] < 0.1
            assert engine.generate(prompts())["weight_version"].tolist() == [step] * 16
            engine.finish_generation()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("level", [0, 1])
def test_each_of_two_tensor_parallel_processes_takes_weights_on_its_own_gpu(path, level):
    with running(path, section(path, tensor_parallel_size=2, sleep_level=level), gpus=2) as (engine, policy, sync):
        for step in (1, 2):
            take_step(policy, step)
            assert sync.sync()["refit/canary_error"] < 0.1
            engine.finish_generation()


def test_an_engine_in_this_process_takes_weights_of_a_policy_in_this_process(path):
    own = section(path)
    policy = HuggingFacePolicy(
        config=HFPolicyConfig(model_name=path, precision="bfloat16", max_total_sequence_length=LENGTH, generation=own)
    )
    engine = VllmGeneration(config=own)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))
    try:
        assert policy.facts["device"].startswith("cuda")
        assert sync.sync()["refit/moved"] == 1.0
    finally:
        engine.shutdown()
        policy.shutdown()
