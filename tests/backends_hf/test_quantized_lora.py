"""LoRA over a base in 4 or 8 bits: everything equals the same adapters over a plain model with the dequantized weights."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.model import load_model
from rl_backends_hf.model_options import HFConfig
from rl_backends_hf.planned_memory import PolicyMemory
from rl_backends_hf.quantized import QuantizedLinear
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import CheckpointError, NotSupportedError, UserError
from rl_train.launch import train as launch
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None or importlib.util.find_spec("peft") is None,
    reason="needs the extras `lora` and `quantized` of rl-backends-hf",
)

KINDS = {
    "nf4": {"load_in_4bit": True},
    "fp4, double": {"load_in_4bit": True, "quantization": {"type": "fp4", "double": True}},
    "8 bits": {"load_in_8bit": True},
}
ADAM = {"kwargs": {"lr": 1e-2}}
ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "addition" / "model")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_precision = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


def handed_on(worker):
    return {name: tensor.clone() for name, tensor in worker.iter_weights()}


def adapters_of(worker):
    return {name: tensor.clone() for name, tensor in worker.model.model.named_parameters() if ".lora_" in name}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """A tiny model with layers of more than one block of 4-bit weights per row."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=160, num_hidden_layers=2, max_position_embeddings=128, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        folder = tmp_path_factory.mktemp("wide")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(parts, wide_folder):
    """A separate worker; with `kind`, its base is quantized."""

    def started(kind=None, *, folder=wide_folder, lora=None, **fields):
        hf = {"lora": {"rank": 4, **(lora or {})}, **({} if kind is None else KINDS[kind])}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(folder, hf=hf, **{"optimizer": ADAM, **fields}))
        worker.setup()
        return worker

    return started


@pytest.fixture
def dequantized(tmp_path, wide_folder):
    """Folder of the plain model with the weights of the quantized base, by bitsandbytes' own functions."""

    def made(kind, precision):
        from bitsandbytes import functional

        model = load_model(wide_folder, options=HFConfig(**KINDS[kind]), dtype=getattr(torch, precision))
        plain = load_model(wide_folder, options=HFConfig(), dtype=getattr(torch, precision))
        layers = dict(model.named_modules())
        with torch.no_grad():
            for name, layer in plain.named_modules():
                if isinstance(layers[name], QuantizedLinear):
                    weight = layers[name].weight
                    state = getattr(weight, "quant_state", None)
                    full = (
                        functional.int8_vectorwise_dequant(weight.data, weight.SCB)
                        if state is None
                        else functional.dequantize_4bit(weight.data, state)
                    )
                    layer.weight.copy_(full)
        plain.save_pretrained(tmp_path / "plain")
        return str(tmp_path / "plain")

    return made


@each_kind
@each_precision
def test_scores_gradients_and_refits_equal_those_of_the_dequantized_model(start, parts, dequantized, kind, precision):
    one = start(kind, precision=precision)
    other = start(folder=dequantized(kind, precision), precision=precision)
    with torch.no_grad():
        for here, there in zip(one.model.model.parameters(), other.model.model.parameters(), strict=True):
            if here.requires_grad:  # peft rounds the initial A to the type of a base that is not quantized
                there.copy_(here.normal_(std=0.05))
    assert_same(handed_on(one), handed_on(other))
    for worker in (one, other):
        parts.train_steps(worker, 1, 2, 3)
    assert_same(adapters_of(one), adapters_of(other))
    assert_same(handed_on(one), handed_on(other))
    assert one.weight_manifest() == other.weight_manifest()
    rows = parts.make_rows(seed=9)
    assert torch.equal(one.get_logprobs(rows)["logprobs"], other.get_logprobs(rows)["logprobs"])
    assert one.facts() == other.facts()


@each_kind
def test_no_bit_of_the_base_changes_and_scoring_equals_training_mode(start, parts, kind):
    worker = start(kind, precision="bfloat16")
    model, rows = worker.model.model, parts.make_rows(seed=9)

    def stored():
        return {name: tensor.clone() for name, tensor in model.named_parameters() if ".lora_" not in name}

    base, weights, before = stored(), handed_on(worker), worker.get_logprobs(rows)["logprobs"]
    model.train()
    with torch.no_grad():
        ids = rows["input_ids"]
        trained = model(ids).logits
        assert torch.equal(trained, model.eval()(ids).logits)
    parts.train_steps(worker, 1, 2)
    assert_same(base, stored())
    assert not torch.equal(before, worker.get_logprobs(rows)["logprobs"])
    assert torch.equal(before, worker.get_logprobs(rows, reference=True)["logprobs"])
    moved = [name for name, tensor in handed_on(worker).items() if not torch.equal(tensor, weights[name])]
    assert len(moved) == 14


def test_resuming_continues_to_the_bit_and_names_another_quantization(start, parts, tmp_path):
    whole, first, second = start("nf4"), start("nf4"), start("nf4")
    parts.train_steps(whole, 1, 2, 3)
    parts.train_steps(first, 1, 2)
    first.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert {path.name for path in (tmp_path / "weights").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    second.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    parts.train_steps(second, 3)
    assert_same(adapters_of(whole), adapters_of(second))
    for other, says in ((None, "none"), ("fp4, double", "fp4, double"), ("8 bits", "int8")):
        with pytest.raises(CheckpointError, match=f"base with quantization nf4, and here it is {says},") as caught:
            start(other).load_checkpoint(tmp_path / "weights", None)
        assert caught.value.key == "policy.hf_cfg.load_in_4bit"


@pytest.mark.parametrize("transport", [ByReferenceTransport, SharedMemoryTransport])
@pytest.mark.parametrize("target", ["adapter", "merged"])
def test_an_engine_samples_with_the_dequantized_base_and_the_adapters(wide_folder, parts, transport, target):
    fields = {"optimizer": ADAM, "max_total_sequence_length": 64, "generation": {"lora": target}}
    policy = HuggingFacePolicy(wide_folder, lora={"rank": 4}, load_in_4bit=True, **fields)
    engine = HuggingFaceGeneration(wide_folder, max_new_tokens=8)
    sync = WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, transport, digests_are_held=False),
        canary=RefitCanary(lambda: make_canary(range(3, 160), num_receivers=1, max_length=64, exact=True)),
    )
    worker = policy.group.worker
    try:
        for step in (1, 2):
            parts.train_steps(worker, step)
            assert sync.sync()["refit/canary_error"] < 1e-5
            live = engine.group.worker.named_weights()
            assert_same({name: tensor.clone() for name, tensor in live.items()}, handed_on(worker))
            assert any(".lora_A" in name for name in live) == (target == "adapter")
    finally:
        sync.close()
        engine.shutdown()
        policy.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["in_process", "ray"])
def test_a_run_of_grpo_verifies_its_refits_and_converts_to_what_it_sampled_with(tmp_path, parts, cluster, local_ray, rlcore):
    overrides = [
        f"cluster.backend={cluster}",
        "++policy.hf_cfg={lora: {rank: 4}, load_in_4bit: true}",
        "grpo.max_num_steps=3",
        "grpo.val_at_end=false",
        "policy.optimizer.kwargs.lr=1e-3",
        "checkpointing.save_period=3",
        f"logger.log_dir={tmp_path / 'runs'}",
    ]
    run = launch.train(ROOT / "examples" / "grpo_addition.yaml", overrides, console=False)
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    checked = [step["refit/canary_error"] for step in steps if "refit/canary_error" in step]
    assert checked
    assert max(checked) < 1e-4
    assert all(step["mismatch/kl"] < 1e-4 for step in steps if "mismatch/kl" in step)
    [checkpoint] = (run.folder / "checkpoints").glob("step_*")
    assert not list((checkpoint / "policy" / "weights").glob("model*.safetensors"))
    rlcore("convert", str(checkpoint), "--to", "hf", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    rlcore("convert", str(checkpoint), "--to", "hf", "--merge", str(tmp_path / "merged"))
    merged = load_model(str(tmp_path / "merged"), options=HFConfig(), dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    worker = HFPolicyWorker(
        parts.make_context(), HFPolicyConfig(model_name=MODEL, hf_cfg={"lora": {"rank": 4}, "load_in_4bit": True})
    )
    worker.setup()
    worker.load_checkpoint(checkpoint / "policy" / "weights", None)
    assert_same(handed_on(worker), dict(merged.named_parameters()))


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("kind", ["nf4", "8 bits"])
def test_variants_of_adapters_equal_those_of_the_dequantized_model(start, parts, dequantized, kind, variant):
    one, other = start(kind, lora=variant), start(folder=dequantized(kind, "float32"), lora=variant)
    for worker in (one, other):
        parts.train_steps(worker, 1, 2)
    assert_same(adapters_of(one), adapters_of(other))
    assert_same(handed_on(one), handed_on(other))


def test_a_value_model_trains_its_head_and_adapters_over_a_quantized_base(start, parts, dequantized, tmp_path):
    fields = {**parts.VALUE_FIELDS}
    one, other = start("nf4", **fields), start(folder=dequantized("nf4", "float32"), **fields)
    rows = parts.make_rows(seed=3)
    for worker in (one, other):
        worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    assert_same(adapters_of(one), adapters_of(other))
    assert torch.equal(one.get_values(rows)["values"], other.get_values(rows)["values"])


def test_what_cannot_be_quantized_is_refused_before_weights_are_read(model_folder, tmp_path):
    with pytest.raises(NotSupportedError, match="the layers of a GPT2LMHeadModel cannot be quantized") as caught:
        load_model(model_folder("gpt2"), options=HFConfig(load_in_4bit=True), dtype=torch.float32)
    assert caught.value.key == "policy.hf_cfg.load_in_4bit"
    with pytest.raises(UserError, match=r"`load_in_4bit`: .*is a GGUF file"):
        load_model(str(tmp_path / "model.gguf"), options=HFConfig(load_in_4bit=True), dtype=torch.float32)
    with pytest.raises(ValueError, match="quantization has no effect without load_in_4bit"):
        HFConfig(load_in_8bit=True, quantization={"double": True})


def stored_bytes(model):
    """Bytes of the memory of all weights and scales."""
    tensors = list(model.parameters())
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            state = getattr(layer.weight, "quant_state", None)
            if state is None:
                tensors.append(layer.weight.SCB)
                continue
            tensors += [state.absmax, state.code]
            tensors += [state.state2.absmax, state.offset] if state.nested else []
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@each_kind
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_counts_the_bytes_that_are_allocated(wide_folder, model_folder, start, kind, tied):
    worker = start(kind, folder=model_folder("qwen3") if tied else wide_folder, precision="bfloat16")
    asked = {"ranks": 1, "several": False, "score": None, "reference": True, "on_gpu": False}
    phases = PolicyMemory(worker.config).by_phase(train=(2, 16), **asked)
    assert phases["held"]["weights"] == stored_bytes(worker.model.model)
    assert "reference weights" not in phases["held"]
    largest = max(layer.form().nbytes for layer in worker.model.model.modules() if isinstance(layer, QuantizedLinear))
    assert phases["train"]["dequantized layer"] == largest
    assert PolicyMemory(worker.config).not_counted() == []


def test_the_plan_suggests_a_base_in_4_bits_that_saves_memory(wide_folder, parts):
    plain = parts.make_config(wide_folder, hf={"lora": {"rank": 4}})
    assert PolicyMemory(plain).saving_overrides() == ["++policy.hf_cfg.load_in_4bit=true"]
    quantized = parts.make_config(wide_folder, hf={"lora": {"rank": 4}, "load_in_4bit": True})
    assert PolicyMemory(quantized).saving_overrides() == []
    asked = {"ranks": 1, "several": False, "score": None, "train": None, "reference": False, "on_gpu": False}
    one, other = (PolicyMemory(config).by_phase(**asked)["held"] for config in (plain, quantized))
    assert other.pop("weights") < one.pop("weights")
    assert one == other


def test_a_quantized_engine_is_refused_for_training_before_a_model_loads_and_can_be_evaluated(rlcore):
    config, option = ROOT / "examples" / "grpo_addition.yaml", "++policy.generation.hf_cfg.load_in_4bit=true"
    code, error = rlcore("validate", config, option)
    assert (code, "Set policy.generation.hf_cfg.load_in_4bit: false" in error) == (2, True)
    code, output = rlcore("eval", config, option, "grpo.max_val_samples=8")
    assert (code, "engine hf with its own weights" in output) == (0, True)
