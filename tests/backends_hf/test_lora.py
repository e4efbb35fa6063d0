"""LoRA adapters: computation, exported weights and checkpoints equal those of plain peft."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFConfig, HFPolicyConfig, LoRAConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import CheckpointError, ConfigError, NotSupportedError, UserError
from rl_core.weights.fingerprint import tensor_digest
from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.algorithms import GRPOTrainer, NLLLossFn, SFTTrainer
from rl_train.config.loader import load_config
from rl_train.launch import train as launch
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "addition" / "model")
ADAM = {"kwargs": {"lr": 1e-2}}
VARIANTS = {
    "plain": {"rank": 4, "alpha": 8},
    "rslora, two layers": {"rank": 3, "alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"rank": 4, "use_dora": True},
    "expression": {"rank": 2, "target_modules": r".*\.(k|v)_proj", "exclude_modules": ["layers.0.self_attn.v_proj"]},
}


@pytest.fixture
def start(peft, parts, model_folder):
    """A separate worker with adapters on a tiny model."""

    def started(kind="llama-tied", *, lora=None, hf=None, **fields):
        given = {"hf": {"lora": {"rank": 4, **(lora or {})}, **(hf or {})}, "optimizer": ADAM, **fields}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), **given))
        worker.setup()
        return worker

    return started


def handed_on(worker):
    return {name: tensor.clone() for name, tensor in worker.iter_weights()}


def base_of(worker):
    """The base weights under the adapters, by their names in the base model."""
    model = worker.model.model
    return {
        name.replace(".base_layer.", "."): tensor.clone() for name, tensor in model.named_parameters() if ".lora_" not in name
    }


def adapters_of(worker):
    return {name: tensor.clone() for name, tensor in worker.model.model.named_parameters() if ".lora_" in name}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def plain_model(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def random_adapter(peft, folder, out, lora):
    """An adapter with non-zero A and B, created and saved by plain peft."""
    settings = LoRAConfig(**lora)
    model = peft.get_peft_model(
        plain_model(folder),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=settings.target_modules,
            exclude_modules=settings.exclude_modules,
            use_rslora=settings.use_rslora,
            use_dora=settings.use_dora,
        ),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in name:
                parameter.mul_(1.0 + 0.2 * torch.rand(parameter.shape, generator=generator))
    model.save_pretrained(out)
    return model


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2"])
def test_logprobs_and_gradients_are_those_of_plain_peft(peft, parts, model_folder, start, tmp_path, kind, variant, recomputes):
    rows = parts.make_rows()
    model = random_adapter(peft, model_folder(kind), tmp_path, VARIANTS[variant])
    worker = start(
        kind, lora=VARIANTS[variant], activation_checkpointing=recomputes, optimizer=parts.SGD, max_grad_norm=None,
        train_micro_batch_size=3,
    )  # fmt: skip
    worker.load_checkpoint(tmp_path, None)
    scored = parts.plain_logprobs(model, rows)
    torch.testing.assert_close(worker.get_logprobs(rows)["logprobs"], scored.detach(), rtol=0, atol=1e-5)
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    (-(scored * mask * rows["weights"].unsqueeze(1)).sum() / mask.sum()).backward()
    expected = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    before = adapters_of(worker)
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    found = parts.gradients_from(before, adapters_of(worker))
    assert parts.largest_relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
def test_before_the_first_step_the_adapted_model_equals_the_base_bit_for_bit(parts, model_folder, start, kind):
    rows = parts.make_rows()
    without = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind)))
    without.setup()
    worker = start(kind)
    assert torch.equal(worker.get_logprobs(rows)["logprobs"], without.get_logprobs(rows)["logprobs"])
    assert_same(handed_on(worker), handed_on(without))
    assert list(worker.weight_manifest().items()) == list(without.weight_manifest().items())
    dora = start(kind, lora={"use_dora": True})
    torch.testing.assert_close(dora.get_logprobs(rows)["logprobs"], without.get_logprobs(rows)["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2"])
def test_training_changes_only_adapters_and_exports_weights_merged_as_by_peft(
    peft, parts, model_folder, start, tmp_path, kind, variant
):
    rows = parts.make_rows()
    worker = start(kind, lora=VARIANTS[variant])
    base, adapters = base_of(worker), adapters_of(worker)
    parts.train_steps(worker, 1, 2, 3)
    merged = handed_on(worker)
    assert_same(base_of(worker), base)
    assert all(not torch.equal(tensor, adapters[name]) for name, tensor in adapters_of(worker).items())
    worker.save_checkpoint(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    model = peft.PeftModel.from_pretrained(plain_model(model_folder(kind)), tmp_path)
    scored = worker.get_logprobs(rows)["logprobs"]
    torch.testing.assert_close(scored, parts.plain_logprobs(model, rows).detach(), rtol=0, atol=1e-5)
    expected = model.merge_and_unload()
    changed = 0
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected.get_parameter(name).data, rtol=0, atol=1e-6)
        changed += not torch.equal(tensor, base[name])
    assert changed == len(worker._adapters._layers)
    torch.testing.assert_close(scored, parts.plain_logprobs(expected, rows).detach(), rtol=0, atol=1e-5)


def test_a_bfloat16_base_has_float32_adapters_and_is_merged_in_float32_and_rounded_once(
    peft, parts, model_folder, start, tmp_path
):
    worker = start(precision="bfloat16", optimizer={"kwargs": {"lr": 1e-5}})
    before = adapters_of(worker)
    parts.train_steps(worker, 1, 2)
    assert {tensor.dtype for tensor in base_of(worker).values()} == {torch.bfloat16}
    # A step of 1e-5 is less than bfloat16 resolves at the size of A.
    assert all(tensor.dtype == torch.float32 for tensor in before.values())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in adapters_of(worker).items())
    worker.save_checkpoint(tmp_path, None)
    model = peft.PeftModel.from_pretrained(plain_model(model_folder("llama-tied")).to(torch.bfloat16).float(), tmp_path)
    expected = model.merge_and_unload()
    for name, tensor in worker.iter_weights():
        assert torch.equal(tensor, expected.get_parameter(name).data.to(torch.bfloat16)), name
    assert {dtype for _, dtype in worker.weight_manifest().values()} == {"bfloat16"}


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_of_a_bfloat16_base_have_float32_gradients_near_those_of_a_float32_base(
    peft, parts, model_folder, tmp_path, autocast
):
    # Weights that bfloat16 represents exactly, so that only activations are rounded.
    plain_model(model_folder("llama-tied")).to(torch.bfloat16).save_pretrained(tmp_path)
    changes, rows = {}, parts.make_rows()
    for precision in ("float32", "bfloat16"):
        lora = {"rank": 4, "autocast": autocast and precision == "bfloat16"}
        fields = {"precision": precision, "optimizer": parts.SGD, "max_grad_norm": None}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path), hf={"lora": lora}, **fields))
        worker.setup()
        outputs = []
        for name, module in worker.model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_hook(lambda *called, outputs=outputs: outputs.append(called[-1].dtype))
        before = {name: tensor.clone() for name, tensor in worker.trained_weights()}
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        after = dict(worker.trained_weights())
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        assert set(outputs) == {torch.bfloat16 if lora["autocast"] else torch.float32}
        changes[precision] = torch.cat([(before[name] - after[name]).flatten() for name in sorted(before)])
    exact, rounded = changes["float32"], changes["bfloat16"]
    # bfloat16 keeps 8 bits: each of about ten roundings in a row is an error of at most 0.4 %.
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.04


@pytest.mark.parametrize("layers", [5, 6])
def test_the_first_step_of_a_model_with_many_adapters_changes_the_sample_of_its_weights(
    peft, parts, model_folder, tmp_path, layers
):
    """It changes only the second matrix of each adapter, which begins at zero."""
    config = transformers.AutoConfig.from_pretrained(model_folder("llama"), num_hidden_layers=layers)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path), hf={"lora": {"rank": 4}}, optimizer=ADAM))
    worker.setup()
    before, sample = adapters_of(worker), worker.weight_sample()
    parts.train_steps(worker, 0)
    assert {name.split(".")[-3] for name, tensor in adapters_of(worker).items() if not torch.equal(tensor, before[name])} == {
        "lora_B"
    }
    assert worker.weight_sample().digest != sample.digest


def test_autocast_of_adapters_requires_bfloat16(peft, tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.hf_cfg\.lora\.autocast.*requires policy.precision: bfloat16"):
        load_config(quickstart(tmp_path, autocast=True), ["policy.precision=float32"])


def test_a_model_whose_layers_are_transposed_is_merged_as_peft_does(peft, parts, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = transformers.GPT2Config(vocab_size=160, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for lora in ({"rank": 4}, {"rank": 4, "use_dora": True}):
        fields = {"hf": {"lora": lora}, "optimizer": ADAM, "max_total_sequence_length": 64}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path / "base"), **fields))
        worker.setup()
        parts.train_steps(worker, 1, 2)
        worker.save_checkpoint(tmp_path / "w", None)
        model = peft.PeftModel.from_pretrained(plain_model(tmp_path / "base"), tmp_path / "w").merge_and_unload()
        for name, tensor in worker.iter_weights():
            torch.testing.assert_close(tensor, model.get_parameter(name).data, rtol=0, atol=1e-6)


def test_experts_that_are_fused_into_one_parameter_stay_frozen(peft, parts, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(6)
        config = transformers.Qwen3MoeConfig(
            **sizes, vocab_size=160, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    worker = HFPolicyWorker(
        parts.make_context(), parts.make_config(str(tmp_path / "base"), hf={"lora": {"rank": 4}}, optimizer=ADAM)
    )
    worker.setup()
    parts.train_steps(worker, 1, 2)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in worker._adapters._layers} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip
    worker.save_checkpoint(tmp_path / "w", None)
    model = peft.PeftModel.from_pretrained(plain_model(tmp_path / "base"), tmp_path / "w").merge_and_unload()
    # Weights are exported under their checkpoint names, with separate experts.
    model.save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    found = handed_on(worker)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_a_family_where_peft_would_adapt_fused_experts_unasked_is_refused(peft, parts, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    # The dense layer has linear layers under the names that experts had before they were fused.
    config = transformers.Qwen3MoeConfig(
        **sizes,
        vocab_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def start(lora):
        HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path), hf={"lora": lora})).setup()

    with pytest.raises(
        NotSupportedError, match=r"peft also adapts parameters other than.*Name only layers that it adapts alone: \[.*q_proj"
    ):
        start({"rank": 4})
    with pytest.raises(UserError, match=r"cannot adapt .* fused"):
        start({"rank": 4, "target_modules": ["gate_proj"]})
    start({"rank": 4, "target_modules": ["q_proj", "v_proj"]})


def test_the_optimizer_has_only_the_adapters(start, parts):
    worker = start()
    parts.train_steps(worker, 1)
    trained = sum(tensor.numel() for tensor in adapters_of(worker).values())
    held = sum(value.numel() for state in worker.state.optimizer.state.values() for value in state.values() if value.ndim > 0)
    assert held == 2 * trained
    assert trained < sum(tensor.numel() for tensor in base_of(worker).values()) / 4
    assert all(parameter.grad is None for parameter in worker.model.parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resumed_training_equals_uninterrupted_training(parts, start, tmp_path, precision):
    fields = {
        "lora": {"dropout": 0.2, "use_dora": True},
        "scheduler": {"name": "cosine", "kwargs": {"num_training_steps": 9}},
        "precision": precision,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        straight = start(**fields)
        parts.train_steps(straight, 1, 2)
        straight.save_checkpoint(tmp_path / "w", tmp_path / "o")
        expected = parts.train_steps(straight, 3, 4)
        resumed = start(**fields)
        torch.manual_seed(2)
        resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
        assert parts.train_steps(resumed, 3, 4) == expected
    assert_same(adapters_of(resumed), adapters_of(straight))
    assert_same(handed_on(resumed), handed_on(straight))
    assert resumed.get_weight_version() == 4


def test_the_reference_is_the_base_without_a_second_copy(parts, start, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a second model was read")

    monkeypatch.setattr(HFPolicyWorker, "build_reference", refuse)
    rows = parts.make_rows()
    worker = start()
    initial = worker.get_logprobs(rows)["logprobs"]
    assert torch.equal(worker.get_logprobs(rows, reference=True)["logprobs"], initial)
    parts.train_steps(worker, 1)
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed = start()
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    for each in (worker, resumed):
        assert torch.equal(each.get_logprobs(rows, reference=True)["logprobs"], initial)
        assert not torch.equal(each.get_logprobs(rows)["logprobs"], initial)
    # The adapters continue learning after they were disabled.
    assert parts.train_steps(worker, 2)[0].grad_norm == parts.train_steps(resumed, 2)[0].grad_norm > 0
    with pytest.raises(NotSupportedError, match="has no reference"):
        start(hf={"reference": False}).get_logprobs(rows, reference=True)


@pytest.mark.parametrize("transport", [ByReferenceTransport, SharedMemoryTransport])
def test_an_engine_samples_with_merged_weights_only(peft, parts, model_folder, transport):
    folder = model_folder("qwen2")
    policy = HuggingFacePolicy(folder, lora={"rank": 4}, optimizer=ADAM, max_total_sequence_length=64)
    engine = HuggingFaceGeneration(folder, max_new_tokens=8)
    sync = WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, transport, digests_are_held=False),
        canary=RefitCanary(lambda: make_canary(range(3, 160), num_receivers=1, max_length=64, exact=True)),
    )
    worker = policy.group.worker
    base = base_of(worker)
    try:
        for step in (1, 2):
            parts.train_steps(worker, step)
            assert sync.is_stale
            assert sync.sync()["refit/canary_error"] < 1e-5
            live = engine.group.worker.named_weights()
            assert_same({name: tensor.clone() for name, tensor in live.items()}, handed_on(worker))
            frozen = dict(worker.model.model.named_parameters())
            for name in worker._adapters._layers:
                under = frozen[worker._adapters._current_names[name]]
                assert live[name].data_ptr() != under.data_ptr()
                assert not torch.equal(live[name], under)
        kept = {name: tensor_digest(tensor) for name, tensor in engine.group.worker.named_weights().items()}
        parts.train_steps(worker, 3)
        assert kept == {name: tensor_digest(tensor) for name, tensor in engine.group.worker.named_weights().items()}
    finally:
        sync.close()
        engine.shutdown()
        policy.shutdown()
    assert_same(base_of(worker), base)


@pytest.mark.full("the test before this one sends merged weights over shared memory; backends_vllm/test_refit.py refits vLLM")
@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_samples_with_merged_weights(peft, parts, tmp_path):
    from rl_backends_vllm import VllmConfig, VllmGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = transformers.Qwen2Config(
            **sizes, vocab_size=160, num_key_value_heads=1, max_position_embeddings=48, initializer_range=0.1,
            bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=True,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = HuggingFacePolicy(str(tmp_path), lora={"rank": 4}, optimizer=ADAM, max_total_sequence_length=48)
    vllm = {"precision": "float32", "max_model_len": 48, "max_num_seqs": 16, "load_format": "dummy"}
    engine = VllmGeneration(config=VllmConfig(model_name=str(tmp_path), max_new_tokens=16, vllm_cfg=vllm))
    sync = WeightSynchronizer(
        policy,
        engine,
        # Buckets smaller than a layer: what vLLM fuses arrives in pieces.
        WeightSender(policy, SharedMemoryTransport, buffer_bytes=64 * 1024, digests_are_held=False),
        canary=RefitCanary(lambda: make_canary(range(3, 160), num_receivers=1, max_length=48, exact=True)),
    )
    rows = parts.make_rows(6)
    prompts = type(rows)(input_ids=rows["input_ids"], input_lengths=rows["input_lengths"], sample_seeds=torch.arange(6))
    try:
        for step in (1, 2, 3):
            parts.train_steps(policy.group.worker, step)
            assert sync.sync()["refit/canary_error"] < 1e-5
            output = engine.generate(prompts)
            assert output["weight_version"].tolist() == [step] * 6
        scored = policy.get_logprobs(
            type(rows)(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"])
        )["logprobs"]
        base = policy.get_reference_policy_logprobs(
            type(rows)(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"])
        )["reference_logprobs"]
    finally:
        sync.close()
        engine.shutdown()
        policy.shutdown()
    sampled = output["logprobs"] != 0
    torch.testing.assert_close(scored[sampled], output["logprobs"][sampled], rtol=0, atol=1e-5)
    assert (scored - base)[sampled].abs().max() > 0.01


def test_the_policy_samples_with_its_adapters(parts, start):
    worker = start(max_total_sequence_length=64)
    parts.train_steps(worker, 1, 2)
    rows = parts.make_rows(4)
    output = worker.generate(rows, greedy=True)
    scored = worker.get_logprobs(type(rows)(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"]))[
        "logprobs"
    ]
    sampled = output["logprobs"] != 0
    assert sampled.any()
    torch.testing.assert_close(scored[sampled], output["logprobs"][sampled], rtol=0, atol=1e-4)


def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing(parts, model_folder, start, tmp_path):
    worker = start()
    parts.train_steps(worker, 1)
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    without = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("llama-tied")))
    without.setup()
    without.save_checkpoint(tmp_path / "whole", None)
    with pytest.raises(CheckpointError, match=r"contains an adapter: resume with the same `policy\.hf_cfg\.lora`"):
        without.load_checkpoint(tmp_path / "w", None)
    before = adapters_of(worker)
    with pytest.raises(CheckpointError, match=r"no adapter was saved there\. It contains the weights of a full model"):
        worker.load_checkpoint(tmp_path / "whole", None)
    with pytest.raises(CheckpointError, match="no adapter was saved"):
        worker.load_checkpoint(tmp_path / "absent", None)
    for lora, says in (
        ({"rank": 2}, "`r` is 4 there and 2 here"),
        ({"alpha": 5}, "`lora_alpha` is 32 there and 5 here"),
        ({"use_dora": True}, "`use_dora` is False there"),
        ({"target_modules": ["q_proj"]}, "exists in only one of the two"),
    ):
        with pytest.raises(CheckpointError, match=says):
            start(lora=lora).load_checkpoint(tmp_path / "w", None)
    with pytest.raises(CheckpointError, match="a different adapter"):
        start("llama-tied", hf={"config_overrides": {"num_hidden_layers": 1}}).load_checkpoint(tmp_path / "w", None)
    tensors = tmp_path / "w" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="Cannot read the adapter"):
        worker.load_checkpoint(tmp_path / "w", None)
    assert_same(adapters_of(worker), before)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"target_modules": ["q_prj"]}, "'q_prj' matches no module of the model. Did you mean 'q_proj'"),
        ({"target_modules": ["q_proj", "w1"]}, "'w1' matches no module"),
        ({"target_modules": "q_proj"}, "as a regular expression for full module names matches no module"),
        ({"target_modules": "(q_proj"}, "is not a regular expression"),
        ({"target_modules": ["lm_head"]}, "is the LM head"),
        ({"target_modules": ["embed_tokens"]}, "is a Embedding, but only linear layers can be adapted"),
        ({"target_modules": ["mlp"]}, "Name the linear layers in it: down_proj, gate_proj, up_proj"),
        ({"exclude_modules": ["norms"]}, "exclude_modules`: 'norms' matches no module"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "excludes all modules"),
    ],
)
def test_modules_that_cannot_be_adapted_are_explained(start, lora, says):
    with pytest.raises(UserError) as caught:
        start("llama", lora=lora)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("hf", "says"),
    [
        ({"lora": {"r": 8}}, "`r` is called `rank` here"),
        ({"lora": {"dim": 8}}, "`dim` is called `rank` here"),
        ({"lora": {"lora_dropout": 0.1}}, "`lora_dropout` is called `dropout` here"),
        ({"lora": {"enabled": True}}, "there is no `enabled`"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"lora": {"dropout": 1.0}}, "less than 1"),
        ({"lora": {"target_modules": []}}, "nothing would be trained"),
        ({"lora": {}, "load_in_4bit": True, "data_parallel": "fsdp2"}, "load_in_4bit requires data_parallel: replicate"),
        ({"lora": {"use_dora": True}, "data_parallel": "fsdp2"}, r"lora\.use_dora requires data_parallel: replicate"),
    ],
)
def test_an_invalid_section_is_an_error_with_a_reason(hf, says):
    with pytest.raises(ValueError, match=says):
        HFConfig(**hf)


def quickstart(tmp_path, **lora):
    path = tmp_path / "sums.yaml"
    section = {"policy": {"hf_cfg": {"lora": lora}}}
    path.write_text(json.dumps({"defaults": str(ROOT / "examples" / "grpo_addition.yaml"), **section}))
    return path


def test_dropout_is_an_error_in_algorithms_that_train_on_samples(peft, tmp_path):
    with pytest.raises(ConfigError, match=r"sums\.yaml.*policy\.hf_cfg\.lora\.dropout.*their ratio is not 1"):
        load_config(quickstart(tmp_path, dropout=0.1))
    assert load_config(quickstart(tmp_path)).run.policy.hf_cfg.lora == LoRAConfig()


def test_a_missing_library_is_named_before_anything_starts(tmp_path, monkeypatch):
    def absent(needs):
        return "peft is not installed"

    monkeypatch.setattr("rl_backends_hf.config.unmet_needs", absent)
    with pytest.raises(ConfigError, match=r"needs peft \(peft is not installed\).*pip install 'rl-backends-hf\[lora\]'"):
        load_config(quickstart(tmp_path))


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"dropout": 0.1}, "their ratio is not 1"),
        ({"rnk": 8}, "rank"),
        ({"target_modules": ["q_prj"]}, "Did you mean 'q_proj'"),
    ],
)
def test_the_command_exits_with_code_2_and_a_reason(peft, rlcore, tmp_path, lora, says):
    code, output = rlcore("train", quickstart(tmp_path, **lora), "cluster.backend=in_process", folder=tmp_path)
    assert code == 2, output
    assert says in " ".join(output.split())
    assert "Traceback" not in output


def test_an_adapter_folder_as_model_is_an_error_that_says_how_to_merge_it(parts, start, tmp_path):
    start().save_checkpoint(tmp_path, None)
    with pytest.raises(UserError, match="rlcore convert CHECKPOINT --to hf --merge"):
        HFPolicyWorker(parts.make_context(), HFPolicyConfig(model_name=str(tmp_path))).setup()


LIMITS = {"max_total_sequence_length": 16, "train_micro_batch_size": 256, "logprob_batch_size": 256}


def addition_policy(lr):
    return HuggingFacePolicy(MODEL, lora={"rank": 16}, optimizer={"kwargs": {"lr": lr}}, **LIMITS)


def assert_base_is_the_file_s(policy):
    saved = plain_model(MODEL)
    base = base_of(policy.group.worker)
    assert all(torch.equal(tensor, base[name]) for name, tensor in saved.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "gain"),
    [(2, None), pytest.param(12, 0.08, marks=pytest.mark.full("adapters learn by DPO in CI, and GRPO takes two steps"))],
)
def test_grpo_with_lora_raises_the_reward_without_changing_the_base(peft, tmp_path, num_steps, gain):
    policy = addition_policy(2e-3)
    generation = HuggingFaceGeneration(MODEL, max_new_tokens=5)
    environment = ArithmeticEnvironment()
    section = {"num_prompts_per_step": 32, "num_generations_per_prompt": 8, "max_num_steps": num_steps, "seed": 3}
    loss = {"reference_policy_kl_penalty": 0.01}
    try:
        trainer = GRPOTrainer(
            policy, config=section, loss_fn=loss, generation=generation, environments={"arithmetic": environment}
        )
        steps = trainer.train(ArithmeticDataset({"num_samples": 4096, "min_digits": 2}))
        assert_base_is_the_file_s(policy)
    finally:
        generation.shutdown()
        environment.shutdown()
        policy.shutdown()
    rewards = [step["reward/mean"] for step in steps]
    print("rewards", [round(reward, 3) for reward in rewards])
    assert len(steps) == num_steps
    assert gain is None or sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + gain
    assert steps[0]["refit/canary_error"] < 1e-4
    assert all(step["mismatch/kl"] < 1e-4 for step in steps)


@pytest.mark.full("adapters learn by DPO in CI; GRPO leaves the base alone there too")
@pytest.mark.slow
def test_sft_with_lora_lowers_the_loss_without_changing_the_base(peft):
    policy = addition_policy(2e-3)
    try:
        section = {"max_num_steps": 30, "global_batch_size": 64, "seed": 1}
        trainer = SFTTrainer(policy, config=section, loss_fn=NLLLossFn())
        steps = trainer.train(ArithmeticDataset({"num_samples": 4096, "min_digits": 2, "with_response": True}))
        assert_base_is_the_file_s(policy)
    finally:
        policy.shutdown()
    losses = [step["loss"] for step in steps]
    print("losses", [round(loss, 3) for loss in losses])
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "length"),
    [
        ("dpo_addition", "dpo.max_num_steps=10"),
        pytest.param("rm_addition", "rm.max_num_steps=40", marks=pytest.mark.full("adapters learn by DPO in CI")),
    ],
)
def test_adapters_learn_preferences_and_the_checkpoint_contains_only_adapters(peft, tmp_path, example, length):
    finished = launch.train(
        ROOT / "examples" / f"{example}.yaml",
        [
            "cluster.backend=in_process",
            "++policy.hf_cfg.lora={rank: 8}",
            "policy.optimizer.kwargs.lr=3e-3",
            length,
            f"logger.log_dir={tmp_path}",
            "checkpointing.save_period=100",
        ],
        console=False,
    )
    steps = map(json.loads, (finished.folder / "metrics.jsonl").read_text().splitlines())
    validations = [step["validation/accuracy"] for step in steps if "validation/accuracy" in step]
    print("accuracies", validations)
    assert validations[0] == 0.5
    assert validations[-1] > 0.7
    [checkpoint] = (finished.folder / "checkpoints").glob("step_*")
    assert not list((checkpoint / "policy" / "weights").glob("model*.safetensors"))
