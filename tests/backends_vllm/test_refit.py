"""Refits of a vLLM engine: equal to a fresh engine, and stopped if a tensor is wrong."""

import os

import pytest
import torch
from acme_transport import AcmeFiles
from tiny_models import FAMILIES, LENGTH, VOCABULARY, make_model, plain_logprobs, rows, sampled_logprobs, take_step
from transformers import AutoModelForCausalLM

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration, refit
from rl_backends_vllm.refit import VllmWeightReceiver
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import WeightSyncError
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REFITS = dict.fromkeys(FAMILIES, 10) | {"qwen3-moe": 6, "mixtral": 6}
EVERY = "RLCORE_FRESH_ENGINE_AFTER_EVERY_REFIT"
"""With this variable set, a fresh engine is started after every refit: about two minutes a family."""


def make_policy(path, lr=5e-3):
    generation = VllmConfig(temperature=0.8, max_new_tokens=16)
    optimizer = OptimizerConfig(kwargs={"lr": lr, "weight_decay": 0.0})
    return HuggingFacePolicy(
        config=HFPolicyConfig(model_name=path, max_total_sequence_length=LENGTH, generation=generation, optimizer=optimizer)
    )


def make_engine(path, **cfg):
    return VllmGeneration(
        config=VllmConfig(
            model_name=path,
            temperature=0.8,
            max_new_tokens=16,
            vllm_cfg={"precision": "float32", "max_model_len": LENGTH, "max_num_seqs": 16, **cfg},
        )
    )


def synchronizer(policy, engine, *, canary=True, buffer_bytes=64 * 1024, transport=SharedMemoryTransport):
    def make():
        return make_canary(range(3, VOCABULARY), num_receivers=1, max_length=LENGTH, exact=True)

    return WeightSynchronizer(
        policy,
        engine,
        # Buckets smaller than a layer: fused tensors arrive in pieces, and their memory is reused in between.
        WeightSender(policy, transport, buffer_bytes=buffer_bytes, digests_are_held=False),
        canary=RefitCanary(make) if canary else None,
    )


FULL = pytest.mark.full("a mixture of experts is refitted in CI; dense models in test_replicas.py and e2e/test_vllm_runs.py")
ALWAYS = ("qwen3-moe",)


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in ALWAYS else FULL) for name in FAMILIES])
def test_after_each_refit_the_engine_equals_plain_transformers_and_a_fresh_engine_on_the_same_weights(family, tmp_path):
    path, refits = make_model(tmp_path / "model", family), REFITS[family]
    policy, engine = make_policy(path), make_engine(path, load_format="dummy")
    sync = synchronizer(policy, engine)
    outputs = {}
    try:
        before = None
        for step in range(1, refits + 1):
            take_step(policy, step)
            found = sync.sync()
            assert found["refit/canary_error"] < 1e-5
            outputs[step] = output = engine.generate(rows(step))
            assert output["weight_version"].tolist() == [step] * 6
            policy.save_checkpoint(str(tmp_path / str(step)))
            plain = AutoModelForCausalLM.from_pretrained(tmp_path / str(step), dtype=torch.float32)
            # Float32 sums in another order: the same tolerance as between any two implementations of this size.
            torch.testing.assert_close(sampled_logprobs(output), plain_logprobs(plain, output), atol=1e-5, rtol=0)
            after = plain.model.embed_tokens.weight.detach().clone()
            assert before is None or (before - after).abs().max() > 1e-4, "the steps change the weights"
            before = after
        take_step(policy, refits + 1)
        found = synchronizer(policy, engine, transport=AcmeFiles).sync()
        assert found["refit/canary_error"] < 1e-5
        assert engine.weight_version == policy.weight_version == refits + 1
    finally:
        engine.shutdown()
        policy.shutdown()
    for step in outputs if EVERY in os.environ else (refits,):
        again = sampled_by_a_fresh_engine(str(tmp_path / str(step)), rows(step))
        assert torch.equal(again["output_ids"], outputs[step]["output_ids"])
        error = (again["logprobs"] - outputs[step]["logprobs"]).abs().max()
        print(f"{family}, refit {step}: {error:.1e} nats from a fresh engine")
        assert error < 1e-5


def sampled_by_a_fresh_engine(path, data, **cfg):
    fresh = make_engine(path, **cfg)
    try:
        return fresh.generate(data)
    finally:
        fresh.shutdown()


# A CPU's packed bias keeps all digits of what a refit sends, while a fresh engine rounds it: sent in full, Qwen2 would differ.
@pytest.mark.parametrize(("one_dtype", "family"), [(True, "qwen2"), (False, "llama-untied")])
def test_a_bfloat16_engine_is_sent_what_it_would_round_to_unless_it_reads_some_weights_in_float32(
    one_dtype, family, tmp_path, monkeypatch
):
    path = make_model(tmp_path / "model", family)
    if not one_dtype:
        monkeypatch.setattr(refit, "_uniform_dtype", lambda model: None)
    policy, engine = make_policy(path), make_engine(path, load_format="dummy", precision="bfloat16")
    try:
        take_step(policy, 1)
        sent = synchronizer(policy, engine, canary=False).sync()["refit/bytes"]
        output = engine.generate(rows(1))
        policy.save_checkpoint(str(tmp_path / "after"))
        numbers = sum(tensor.numel() for _, tensor in policy.group.worker.iter_weights())
    finally:
        engine.shutdown()
        policy.shutdown()
    # Each tensor begins at a multiple of 64 bytes.
    assert sent == pytest.approx((2 if one_dtype else 4) * numbers, rel=0.01)
    again = sampled_by_a_fresh_engine(str(tmp_path / "after"), rows(1), precision="bfloat16")
    assert torch.equal(again["output_ids"], output["output_ids"])
    assert torch.equal(again["logprobs"], output["logprobs"])


def test_an_engine_without_weights_refuses_to_sample_before_its_first_refit(tmp_path):
    path = make_model(tmp_path / "model", "llama-tied")
    engine = make_engine(path, load_format="dummy")
    try:
        assert engine.weight_version == -1
        with pytest.raises(Exception, match="does not have complete weights"):
            engine.generate(rows(1))
    finally:
        engine.shutdown()


def test_weights_packed_in_another_thread_are_read_as_they_were_packed(tmp_path):
    # Sizes that no other test has: vLLM keeps what it built for the first weights of a size until the process ends.
    path = make_model(tmp_path / "model", "llama-untied", intermediate_size=80)
    policy, engine = make_policy(path), make_engine(path, load_format="dummy")
    try:
        # The reader of shared memory is a new thread, which starts with the process's number of threads, not torch's.
        for step, transport in enumerate([SharedMemoryTransport, AcmeFiles], start=1):
            take_step(policy, step)
            assert synchronizer(policy, engine, transport=transport).sync()["refit/canary_error"] < 1e-5
    finally:
        engine.shutdown()
        policy.shutdown()


def test_a_policy_of_the_classes_that_vllm_computes_with_can_be_made_and_trained_in_the_same_process(tmp_path):
    path = make_model(tmp_path / "model", "olmo2")
    before, engine = make_policy(path), make_engine(path, load_format="dummy")
    after = make_policy(path)
    try:
        for policy in (before, after):
            take_step(policy, 1)
            assert synchronizer(policy, engine).sync()["refit/canary_error"] < 1e-5
        output = engine.generate(rows(1))
        after.save_checkpoint(str(tmp_path / "after"))
    finally:
        engine.shutdown()
        before.shutdown()
        after.shutdown()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    torch.testing.assert_close(sampled_logprobs(output), plain_logprobs(plain, output), atol=1e-5, rtol=0)
    # A second engine in this process computes with the same classes.
    again = sampled_by_a_fresh_engine(str(tmp_path / "after"), rows(1))
    assert torch.equal(again["output_ids"], output["output_ids"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A policy and an engine that agree at weight version 1."""
    path = make_model(tmp_path_factory.mktemp("pair") / "model", "llama-untied")
    policy, engine = make_policy(path), make_engine(path, load_format="dummy")
    take_step(policy, 1)
    synchronizer(policy, engine).sync()
    yield policy, engine
    engine.shutdown()
    policy.shutdown()


def lost(name, tensor, earlier):
    return None


def transposed(name, tensor, earlier):
    return tensor.t().contiguous()


def delayed(name, tensor, earlier):
    return earlier


SQUARE, FUSED, NORM = (
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
)


@pytest.mark.parametrize(
    ("fault", "name"),
    [(lost, SQUARE), (lost, FUSED), (lost, NORM), (lost, "lm_head.weight"), (lost, "model.embed_tokens.weight"),
     (transposed, SQUARE), (transposed, FUSED), (delayed, SQUARE), (delayed, FUSED), (delayed, NORM),
     (delayed, "lm_head.weight")],
)  # fmt: skip
def test_a_tensor_that_the_engine_loses_transposes_or_delays_stops_the_run(pair, fault, name, monkeypatch):
    policy, engine = pair
    earlier = {key: tensor.clone() for key, tensor in policy.group.worker.iter_weights()}
    take_step(policy, 2)
    give = VllmWeightReceiver.load_into_vllm

    def faulty(self, tensors):
        changed = {key: fault(key, tensor, earlier[key]) if key == name else tensor for key, tensor in tensors.items()}
        give(self, {key: tensor for key, tensor in changed.items() if tensor is not None})

    with monkeypatch.context() as patch:
        patch.setattr(VllmWeightReceiver, "load_into_vllm", faulty)
        with pytest.raises(WeightSyncError) as caught:
            synchronizer(policy, engine).sync()
    says = "did not update all layers" if fault is lost else "computes log-probabilities that differ from the policy's"
    assert says in str(caught.value)
    # A full refit repairs it.
    assert synchronizer(policy, engine).sync()["refit/canary_error"] < 1e-5


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lost, "left them out"),
        (transposed, "computes log-probabilities that differ from the policy's"),
        (delayed, "computes log-probabilities that differ from the policy's"),
    ],
)
def test_a_tensor_that_the_policy_loses_transposes_or_delays_stops_the_run(pair, fault, says, monkeypatch):
    policy, engine = pair
    worker = policy.group.worker
    earlier = {key: tensor.clone() for key, tensor in worker.iter_weights()}
    take_step(policy, 3)
    iterate = worker.iter_weights

    def faulty(names=None):
        for key, tensor in iterate(names):
            given = fault(key, tensor, earlier[key]) if key == SQUARE else tensor
            if given is not None:
                yield key, given

    with monkeypatch.context() as patch:
        patch.setattr(worker, "iter_weights", faulty)
        with pytest.raises(WeightSyncError, match=says):
            synchronizer(policy, engine).sync()
    assert synchronizer(policy, engine).sync()["refit/canary_error"] < 1e-5


def test_an_engine_with_an_incomplete_refit_cannot_sample(pair, monkeypatch):
    policy, engine = pair
    take_step(policy, 4)
    give = VllmWeightReceiver.load_into_vllm
    calls = []

    def dies_at_the_third(self, tensors):
        calls.append(tensors)
        if len(calls) == 3:
            raise RuntimeError("no more")
        give(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(VllmWeightReceiver, "load_into_vllm", dies_at_the_third)
        with pytest.raises(WeightSyncError, match="no more"):
            synchronizer(policy, engine).sync()
    with pytest.raises(Exception, match="have not arrived in this refit"):
        engine.generate(rows(4))
    synchronizer(policy, engine).sync()
    assert engine.generate(rows(4))["weight_version"].tolist() == [policy.weight_version] * 6


def test_weights_of_another_model_are_refused_before_anything_is_loaded(pair, tmp_path):
    _, engine = pair
    other = make_policy(make_model(tmp_path / "other", "qwen3"))
    version, output = engine.weight_version, engine.generate(rows(5))
    try:
        with pytest.raises(WeightSyncError, match=r"q_norm\.weight: the policy sends it, but the engine has no such weight"):
            synchronizer(other, engine).sync()
    finally:
        other.shutdown()
    assert engine.weight_version == version
    engine.invalidate_kv_cache()
    assert torch.equal(engine.generate(rows(5))["output_ids"], output["output_ids"])
