"""Adapters of the policy in vLLM: W x + s B A x as peft computes it, sent alone after the first refit, and verified."""

import asyncio
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from peft import PeftModel
from tiny_models import FAMILIES, LENGTH, VOCABULARY, make_model, plain_logprobs, rows, sampled_logprobs, take_step
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from vllm import ModelRegistry
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.models import supports_lora

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration, VllmGenerationWorker
from rl_backends_vllm.config import LoraRank, VllmEngineConfig
from rl_backends_vllm.lora import EngineAdapter, OneAdapterProducts, lora_arguments
from rl_backends_vllm.refit import VllmWeightReceiver
from rl_backends_vllm.sources import why_not_adapted
from rl_core.config.section import Devices
from rl_core.errors import ConfigError, NotSupportedError, WeightSyncError, WorkerError
from rl_core.weights.adapters import LORA_A, LORA_B, LORA_SCALE, adapters_in
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

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


@pytest.fixture(scope="module")
def pair(path):
    made = Pair(path)
    made.sync.sync()
    yield made
    made.shutdown()


def check_agreement(pair, model):
    output = pair.engine.generate(rows(1))
    torch.testing.assert_close(sampled_logprobs(output), plain_logprobs(model, output), atol=1e-5, rtol=0)
    return output


def test_without_a_step_the_engine_computes_with_the_base(pair):
    check_agreement(pair, AutoModelForCausalLM.from_pretrained(pair.path, dtype=torch.float32))


def check_refits_of_adapters(pair, folder):
    before = None
    for step in (1, 2):
        take_step(pair.policy, step)
        adapters = adapters_in(pair.policy.prepare_refit_info())
        metrics = pair.sync.sync()
        # Each tensor begins at a multiple of 64 bytes.
        assert metrics["refit/bytes"] == sum(-(-4 * torch.Size(shape).numel() // 64) * 64 for shape, _ in adapters.values())
        output = check_agreement(pair, pair.peft_model(folder / str(step)))
        assert output["weight_version"].tolist() == [pair.policy.weight_version] * 6
        after = sampled_logprobs(output)
        # The prompts are those of the step before: a prefix that was kept would have the earlier adapter's keys and values.
        assert before is None or before.shape != after.shape or (before - after).abs().max() > 0.05
        before = after
    assert pair.engine.group.worker.weight_digests().keys() == adapters.keys()


def test_each_refit_sends_adapters_alone_and_the_engine_agrees_with_peft(pair, tmp_path):
    check_refits_of_adapters(pair, tmp_path)


@pytest.mark.parametrize("vllm_cfg", [{"async_engine": True}, {"tensor_parallel_size": 2, "async_engine": True}], ids=str)
def test_an_engine_in_other_processes_agrees_with_peft(vllm_cfg, path, tmp_path):
    pair = Pair(path, **vllm_cfg)
    try:
        pair.sync.sync()
        check_refits_of_adapters(pair, tmp_path)
    finally:
        pair.shutdown()


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
def trained(pair):
    """The pair after a step; its engine is repaired at the end."""
    take_step(pair.policy, 4)
    pair.sync.sync()
    take_step(pair.policy, 5)
    yield pair
    assert pair.synchronizer().sync()["refit/canary_error"] < 1e-5


@pytest.mark.parametrize("fault", [wrong_scale, transposed, of_another_layer, without_one, None])
def test_the_canary_stops_an_engine_that_computes_with_a_wrong_adapter(trained, fault, monkeypatch):
    replace = EngineAdapter.replace
    with monkeypatch.context() as patch:
        # Without any of these faults, the engine keeps the adapter of the step before.
        patch.setattr(EngineAdapter, "replace", lambda self, tensors: fault and replace(self, fault(tensors)))
        with pytest.raises(WeightSyncError, match="computes log-probabilities that differ from the policy's"):
            trained.synchronizer().sync()


def test_a_tensor_of_an_adapter_that_is_lost_stops_the_refit(trained, monkeypatch):
    load = VllmWeightReceiver.load_into_vllm

    def lossy(self, tensors):
        load(self, {name: tensor for name, tensor in tensors.items() if name != LAYER + LORA_B})

    with monkeypatch.context() as patch:
        patch.setattr(VllmWeightReceiver, "load_into_vllm", lossy)
        with pytest.raises(WeightSyncError, match=f"has not received '{LAYER}.lora_B.weight' of the adapters"):
            trained.sync.sync()


def test_buffers_that_vllm_does_not_update_stop_the_refit(trained, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(BaseLinearLayerWithLoRA, "set_lora", lambda self, index, lora_a, lora_b: None)
        with pytest.raises(WeightSyncError, match=r"vLLM does not compute with the new adapters of .*o_proj"):
            trained.sync.sync()


def adapter_of(layer, *, rank=RANK, size_in=64, size_out=64):
    return {layer + LORA_A: ((rank, size_in), "float32"), layer + LORA_B: ((size_out, rank), "float32"),
            layer + LORA_SCALE: ((), "float32")}  # fmt: skip


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        (
            adapter_of("model.embed_tokens", size_in=VOCABULARY),
            "an adapter of 'model.embed_tokens', which is not a linear layer",
        ),
        (adapter_of("lm_head", size_out=VOCABULARY), "an adapter of 'lm_head', which is not a linear layer"),
        (adapter_of("model.layers.7.mlp.up_proj"), "an adapter of 'model.layers.7.mlp.up_proj'"),
        (adapter_of(LAYER, rank=9), "adapters of rank 9, but the engine was started with max_lora_rank 8"),
        (adapter_of(LAYER, size_in=65), "lora_A.weight"),
    ],
)
def test_adapters_that_fit_no_layer_are_refused_before_they_are_sent(pair, adapters, says):
    version = pair.engine.weight_version
    with pytest.raises(WorkerError, match=says):
        pair.engine.prepare_refit_info(adapters)
    assert pair.engine.generate(rows(1))["weight_version"].tolist() == [version] * 6


def test_an_adapter_replaces_another_of_a_larger_rank_and_layers_without_one_compute_with_the_base(pair):
    adapter = pair.engine.group.worker._running._engine.model_executor.driver_worker.worker.rlcore_receiver._adapter
    module, _ = adapter._module_of(LAYER)
    generator = torch.Generator().manual_seed(0)
    for rank in (7, 3):
        a, b = torch.randn(rank, 64, generator=generator), torch.randn(64, rank, generator=generator)
        adapter.replace({LAYER + LORA_A: a, LAYER + LORA_B: b, LAYER + LORA_SCALE: torch.tensor(0.3)})
        product = module.lora_b_stacked[0][0, 0] @ module.lora_a_stacked[0][0, 0]
        torch.testing.assert_close(product, 0.3 * b @ a)
    other, index = adapter._module_of("model.layers.0.mlp.up_proj")
    assert not other.lora_b_stacked[index].any()
    assert pair.synchronizer().sync()["refit/canary_error"] < 1e-5


def test_products_with_bfloat16_layers_are_computed_in_float32_and_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 32, generator=generator).bfloat16(), torch.randn(5, 24, generator=generator).bfloat16()
    a = tuple(torch.randn(1, 1, 4, 32, generator=generator) for _ in range(2))
    b = tuple(torch.randn(1, 1, size, 4, generator=generator) for size in (16, 8))
    exact = y.double() + torch.cat([x.double() @ (t[0, 0] @ s[0, 0]).double().t() for s, t in zip(a, b, strict=True)], dim=1)
    products = OneAdapterProducts(8, 2, "cpu")
    products.use([SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)])
    products.add_lora_linear(y, x, a, b, 1.0, (16, 8))
    assert y.dtype == torch.bfloat16
    # Half a unit in the last of eight bits.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8).all()


def test_an_engine_without_adapters_refuses_them(path):
    engine = VllmGenerationWorker(path, precision="float32", max_model_len=LENGTH, max_num_seqs=16, async_engine=True)
    engine.setup()
    try:
        with pytest.raises(NotSupportedError, match=r"started without adapters: set .*max_lora_rank"):
            engine.prepare_refit_info(adapter_of(LAYER))
    finally:
        engine.shutdown()


def test_another_version_of_vllm_is_named_if_it_stores_adapters_elsewhere():
    worker = SimpleNamespace(model_runner=object(), get_model=object)
    with pytest.raises(NotSupportedError, match=r"^vLLM 0\.\d+\.\d+.* stores LoRA adapters differently.*lora_manager"):
        EngineAdapter(worker)


def test_the_maximum_rank_is_that_of_the_policy_rounded_up_to_one_that_vllm_knows(path):
    assert get_args(LoraRank) == get_args(MaxLoRARanks)
    for rank, known in ((1, 1), (4, 8), (16, 16), (17, 32), (300, 320), (512, 512)):
        policy = section(path, rank=rank)
        assert policy.generation.for_policy(policy).vllm_cfg.max_lora_rank == known
    merged = policy.generation.model_copy(update={"lora": "merged"})
    assert merged.for_policy(policy).vllm_cfg.max_lora_rank is None
    assert policy.generation.adapter_problem(policy) is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 513}, "the adapters have rank 513, and this engine's maximum (vllm_cfg.max_lora_rank) is 512"),
        ({"max_lora_rank": 1}, "the adapters have rank 4, and this engine's maximum (vllm_cfg.max_lora_rank) is 1"),
        ({"pipeline_parallel_size": 2}, "vllm_cfg.pipeline_parallel_size is 2, and its stages receive no adapters"),
    ],
)
def test_what_the_engine_cannot_adapt_is_known_from_its_section(path, settings, says):
    policy = section(path, **settings)
    assert policy.generation.adapter_problem(policy) == says


def test_an_engine_on_gpus_keeps_its_frozen_weights_when_it_sleeps(path):
    generation = section(path).generation
    for target, level in (("adapter", 1), ("merged", 2)):
        shared = generation.model_copy(update={"lora": target}).for_devices(Devices(use_gpus=True, trains=True))
        assert shared.vllm_cfg.sleep_level == level


@pytest.mark.parametrize(
    ("config", "device", "says"),
    [
        (GPT2Config(architectures=["GPT2LMHeadModel"]), "cpu", "vLLM's GPT2LMHeadModel does not support adapters"),
        (FAMILIES["mixtral"], "cpu", "the model is a mixture of experts"),
        (FAMILIES["llama-tied"], "cuda", "on GPUs, vLLM supports adapters in bfloat16 and float16 only"),
    ],
)
def test_models_that_vllm_cannot_adapt_are_errors_before_the_engine_starts(config, device, says):
    with pytest.raises(ConfigError, match=f"policy.generation.lora: adapter cannot be used: {says}") as caught:
        lora_arguments(VllmEngineConfig(max_lora_rank=8), device=device, dtype="float32", hf_config=config)
    assert caught.value.key == "policy.generation.lora"


def test_a_model_that_vllm_cannot_adapt_is_known_from_the_section(tmp_path):
    policy = section(make_model(tmp_path, "mixtral"))
    assert policy.generation.adapter_problem(policy).startswith("the model is a mixture of experts")


@pytest.mark.parametrize(
    "architecture",
    ["BloomForCausalLM", "CohereForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma2ForCausalLM",
     "InternLM3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM",
     "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM"],
)  # fmt: skip
def test_the_source_of_vllms_models_says_which_support_adapters(architecture):
    known = ModelRegistry.models
    expected = architecture not in known or bool(supports_lora(known[architecture].load_model_cls()))
    assert (why_not_adapted(LlamaConfig(architectures=[architecture])) is None) == expected
