"""The sampling model computes W x + s B A x as the policy does: equal in float32, and much nearer than merged in bfloat16."""

import asyncio

import pytest
import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WorkerError
from rl_train.logprob_agreement import TokenDifferences, rows_to_score, sampled_tokens
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, DiskTransport, SharedMemoryTransport

NEW_TOKENS = 20
"""Enough steps for packed products (`packed_linears`)."""


@pytest.fixture
def start(parts, model_folder, tmp_path):
    """A policy with adapters, an engine and what connects them; closed at the end."""
    pytest.importorskip("peft")
    started = []

    def make(kind="llama-tied", transport=SharedMemoryTransport, *, target="adapter", lora=None, canary=True, **fields):
        folder = model_folder(kind)
        engine = HuggingFaceGeneration(
            folder, max_new_tokens=NEW_TOKENS, torch_dtype=fields.get("precision", "float32"), lora=target
        )
        section = {
            "model_name": folder,
            "max_total_sequence_length": 64,
            "hf_cfg": {"lora": {"rank": 4, **(lora or {})}},
            "optimizer": {"kwargs": {"lr": 1e-2}},
            "generation": {"backend": "hf", "lora": target},
            **fields,
        }
        policy = HuggingFacePolicy(config=HFPolicyConfig(**section))
        exact = "precision" not in fields
        made = make_canary(range(3, 160), num_receivers=1, max_length=64, exact=exact)
        sync = WeightSynchronizer(
            policy,
            engine,
            WeightSender(policy, transport, folder=tmp_path),
            canary=RefitCanary(lambda: made) if canary else None,
        )
        started.extend([sync.close, engine.shutdown, policy.shutdown])
        return policy, engine, sync

    yield make
    for close in started:
        close()


def prompts(rows=6, width=12):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 160, (rows, width), generator=generator)
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), width), sample_seeds=torch.arange(rows))


def difference(policy, engine):
    """Mean |difference| of the log-probabilities of sampled tokens, in nats."""
    output = engine.generate(prompts())
    scores = policy.get_logprobs(rows_to_score(output))["logprobs"]
    return TokenDifferences(output["output_ids"], scores, output["logprobs"], compared=sampled_tokens(output)).mean


@pytest.mark.parametrize("transport", [ByReferenceTransport, SharedMemoryTransport, DiskTransport])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True, "alpha": 7, "target_modules": r".*(c_attn|q_proj|down_proj)"}])
def test_the_engine_computes_as_the_policy_after_each_refit(start, parts, kind, transport, lora):
    policy, engine, sync = start(kind, transport, lora=lora)
    frozen = {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights() if ".lora_" not in name}
    for step in (1, 2, 3):
        parts.train_steps(policy.group.worker, step)
        metrics = sync.sync()
        assert metrics.get("refit/canary_error", 0.0) < 1e-5
        assert difference(policy, engine) < 1e-5
    live = engine.group.worker.named_weights()
    assert [name for name, tensor in frozen.items() if not torch.equal(live[name], tensor)] == []
    assert sum(name.endswith("lora_scale") for name in live) == len(policy.group.worker._adapters._layers)


def test_by_reference_frozen_weights_and_adapters_are_in_memory_once(start, parts):
    policy, engine, sync = start(transport=ByReferenceTransport)
    for step in (1, 2):
        parts.train_steps(policy.group.worker, step)
        sync.sync()
        live = engine.group.worker.named_weights()
        sent = {name: tensor.data_ptr() for name, tensor in policy.group.worker.iter_weights() if "scale" not in name}
        assert {name: live[name].data_ptr() for name in sent} == sent
    parts.train_steps(policy.group.worker, 3)
    with pytest.raises(WorkerError, match=r"WeightSyncError: .*newer than version"):
        engine.generate(prompts())


def test_in_bfloat16_the_engine_is_the_policy_and_a_merged_one_is_not(start, parts):
    """Merged weights are rounded to bfloat16, in which an update of 2^-9 of a weight is lost."""
    found = {}
    for target in ("adapter", "merged"):
        policy, engine, sync = start(target=target, precision="bfloat16", canary=False)
        for step in (1, 2, 3):
            parts.train_steps(policy.group.worker, step)
        sync.sync()
        found[target] = difference(policy, engine)
    assert found["adapter"] < 0.5 * found["merged"]


def test_rows_in_progress_continue_with_the_adapters_of_a_refit(start, parts):
    policy, engine, sync = start()
    parts.train_steps(policy.group.worker, 1)
    sync.sync()
    outputs, rows = {}, prompts()
    rows["max_new_tokens"] = torch.tensor([3] + [NEW_TOKENS] * 5)

    async def collect():
        async for row, output in engine.generate_async(rows):
            if not outputs:
                parts.train_steps(policy.group.worker, 2)
                sync.sync()
            outputs[row] = output

    asyncio.run(collect())
    versions = [set(output["token_versions"][0].tolist()) & {1, 2} for output in outputs.values()]
    assert len(versions) == 6
    assert {1, 2} in versions
    assert difference(policy, engine) < 1e-5


def test_dora_can_only_be_merged(model_folder, start):
    section = HFPolicyConfig(model_name=model_folder("llama"), hf_cfg={"lora": {"use_dora": True}})
    assert section.adapter_problem == "policy.hf_cfg.lora.use_dora also scales each row of the merged weight"
    assert HFPolicyConfig(model_name=model_folder("llama"), hf_cfg={"lora": {}}).adapter_problem is None
    policy, _, _ = start(lora={"use_dora": True})
    with pytest.raises(WorkerError, match=r"adapter` cannot be used: .*use_dora.* scales each row"):
        policy.wait_ready()


def test_unmerged_tensors_are_those_of_the_adapters(start, parts):
    policy, _, _ = start()
    parts.train_steps(policy.group.worker, 1)
    worker = policy.group.worker
    tensors = dict(worker.iter_weights())
    worker._adapters._exports_merged = True
    merged = dict(worker.iter_weights())
    for name in merged:
        layer = name.removesuffix(".weight")
        expected = tensors[name]
        if layer + ".lora_scale" in tensors:
            expected = expected + tensors[layer + ".lora_scale"] * (
                tensors[layer + ".lora_B.weight"] @ tensors[layer + ".lora_A.weight"]
            )
        torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-6)
