"""Adapters of the policy in vLLM: W x + s B A x as peft computes it, sent alone after the first refit, and verified."""

import asyncio
from typing import get_args

import pytest
import torch
from peft import PeftModel
from tiny_models import LENGTH, VOCABULARY, make_model, plain_logprobs, rows, sampled_logprobs, take_step
from transformers import AutoModelForCausalLM
from vllm.config.lora import MaxLoRARanks

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration
from rl_backends_vllm.config import LoraRank
from rl_backends_vllm.lora import EngineAdapter, lora_arguments
from rl_backends_vllm.model_folder import read_config
from rl_core.config.section import Devices
from rl_core.errors import ConfigError, NotSupportedError, UserError, WeightSyncError
from rl_core.weights.adapters import LORA_A, LORA_B, LORA_SCALE, adapters_in
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.vllm

RANK, ALPHA = 4, 12
LAYER = "model.layers.1.self_attn.o_proj"
"""A square layer."""


def section(path, *, rank=RANK, **vllm_cfg):
    generation = VllmConfig(temperature=0.8, max_new_tokens=12, lora="adapter", vllm_cfg={"max_num_seqs": 16, **vllm_cfg})
    return HFPolicyConfig(
        model_name=path,
        precision="float32",
        max_total_sequence_length=LENGTH,
        generation=generation,
        optimizer={"kwargs": {"lr": 2e-2, "weight_decay": 0.0}},
        hf_cfg={"lora": {"rank": rank, "alpha": ALPHA}},
    )


class Pair:
    """A policy with adapters, and an engine for it."""

    def __init__(self, path, **vllm_cfg):
        config = section(path, **vllm_cfg)
        self.path, self.policy = path, HuggingFacePolicy(config=config)
        self.engine = VllmGeneration(config=config.generation.for_policy(config))
        self.sync = self.synchronizer()

    def synchronizer(self, canary=True):
        sender = WeightSender(self.policy, SharedMemoryTransport, buffer_bytes=64 * 1024, digests_are_held=False)

        def make():
            return make_canary(range(3, VOCABULARY), num_receivers=1, max_length=LENGTH, exact=True)

        return WeightSynchronizer(self.policy, self.engine, sender, canary=RefitCanary(make) if canary else None)

    def peft_model(self, folder):
        self.policy.save_checkpoint(str(folder))
        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return PeftModel.from_pretrained(base, folder)

    def shutdown(self):
        self.engine.shutdown()
        self.policy.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("adapters") / "model", "llama-tied")


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "in a process of its own"])
def pair(path, request):
    made = Pair(path, async_engine=request.param)
    made.sync.sync()
    yield made
    made.shutdown()


def check_agreement(pair, model):
    output = pair.engine.generate(rows(1))
    torch.testing.assert_close(sampled_logprobs(output), plain_logprobs(model, output), atol=1e-5, rtol=0)
    return output


def test_without_a_step_the_engine_computes_with_the_base(pair):
    check_agreement(pair, AutoModelForCausalLM.from_pretrained(pair.path, dtype=torch.float32))


def test_each_refit_sends_adapters_alone_and_the_engine_agrees_with_peft(pair, tmp_path):
    before = None
    for step in (1, 2):
        take_step(pair.policy, step)
        adapters = adapters_in(pair.policy.prepare_refit_info())
        metrics = pair.sync.sync()
        # Each tensor begins at a multiple of 64 bytes.
        assert metrics["refit/bytes"] == sum(-(-4 * torch.Size(shape).numel() // 64) * 64 for shape, _ in adapters.values())
        output = check_agreement(pair, pair.peft_model(tmp_path / str(step)))
        assert output["weight_version"].tolist() == [pair.policy.weight_version] * 6
        after = sampled_logprobs(output)
        # The prompts are those of the step before: a prefix that was kept would have the earlier adapter's keys and values.
        assert before is None or before.shape != after.shape or (before - after).abs().max() > 0.05
        before = after
    assert pair.engine.group.worker.weight_digests().keys() == adapters.keys()


def test_a_row_in_progress_continues_with_the_new_adapter(pair, tmp_path):
    long = rows(3, count=2, width=6)
    long["max_new_tokens"] = torch.tensor([2, 30])
    long["input_lengths"] = torch.tensor([6, 6])

    async def refit_after_the_first():
        outputs = {}
        async for row, output in pair.engine.generate_async(long):
            if not outputs:
                pair.engine.group.worker._running.pause()
                take_step(pair.policy, 3)
                pair.sync.sync()
            outputs[row] = output
        return outputs[1]

    old = pair.peft_model(tmp_path / "old")
    output = asyncio.run(refit_after_the_first())
    new = pair.peft_model(tmp_path / "new")
    versions = output["token_versions"][output["token_versions"] >= 0].tolist()
    is_new = torch.tensor(versions[-int(output["generation_lengths"]) :]) == pair.policy.weight_version
    assert is_new.any(), "the row ended before the refit"
    found = sampled_logprobs(output)
    for model, mask in ((old, ~is_new), (new, is_new)):
        torch.testing.assert_close(found[mask], plain_logprobs(model, output)[mask], atol=1e-5, rtol=0)


def wrong_scale(tensors):
    return {name: tensor / 2 if name.endswith(LORA_SCALE) else tensor for name, tensor in tensors.items()}


def transposed(tensors):
    # Only matrices with as many rows as columns fit, so their product is transposed instead.
    a, b = tensors[LAYER + LORA_A], tensors[LAYER + LORA_B]
    return {**tensors, LAYER + LORA_A: b.t().contiguous(), LAYER + LORA_B: a.t().contiguous()}


def of_another_layer(tensors):
    other = LAYER.replace("layers.1", "layers.0")
    return {**tensors, **{LAYER + suffix: tensors[other + suffix] for suffix in (LORA_A, LORA_B)}}


def without_one(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}


@pytest.fixture
def trained(path):
    """An in-process pair after two steps, for faults of the engine."""
    made = Pair(path)
    made.sync.sync()
    for step in (1, 2):
        take_step(made.policy, step)
        made.sync.sync()
    yield made
    made.shutdown()


@pytest.mark.parametrize("fault", [wrong_scale, transposed, of_another_layer, without_one])
def test_the_canary_stops_an_engine_that_computes_with_a_wrong_adapter(trained, fault, monkeypatch):
    replace = EngineAdapter.replace
    monkeypatch.setattr(EngineAdapter, "replace", lambda self, tensors: replace(self, fault(tensors)))
    with pytest.raises(WeightSyncError, match="computes log-probabilities that differ from the policy's"):
        trained.synchronizer().sync()
