"""Adapters of experts: compared with sums W + s B A that this file writes out expert by expert, and with plain peft."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.func import functional_call

from rl_backends_base.adapters import AdaptedWeight
from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFConfig, HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.convert import to_folder
from rl_backends_hf.generation import HFGenerationWorker
from rl_backends_hf.planned_memory import PolicyMemory
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import CheckpointError, ConfigError, UserError, WeightSyncError
from rl_core.interfaces.conversion import Conversion
from rl_train.config.loader import load_config
from rl_train.launch.train import train as launch
from rl_train.logprob_agreement import TokenDifferences, rows_to_score, sampled_tokens
from rl_train.run_folders.convert import convert
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

ADDITION = Path(__file__).parents[2] / "examples" / "addition" / "model"
ADAM = {"kwargs": {"lr": 1e-2}}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    # Its tensors are [experts, in, out], and it has biases.
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, num_local_experts=4, layer_types=["full_attention"] * 2),
}
VARIANTS = {
    "with attention": {"rank": 4, "target_parameters": EXPERTS},
    "one tensor, rslora": {
        "rank": 3, "alpha": 7, "use_rslora": True, "target_modules": ["q_proj"], "target_parameters": ["down_proj"],
    },
    "experts alone": {"rank": 2, "target_modules": [], "target_parameters": EXPERTS},
}  # fmt: skip
each_mixture = pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)])
each_variant = pytest.mark.parametrize(
    "variant", ["with attention", "one tensor, rslora", pytest.param("experts alone", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The folder of a tiny mixture of experts."""
    made = {}

    def folder(kind):
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(8)
                model = transformers.AutoModelForCausalLM.from_config(MIXTURES[kind]())
                for name, parameter in model.named_parameters():
                    if "bias" in name or "sinks" in name:
                        torch.nn.init.normal_(parameter, std=0.2)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return str(made[kind])

    return folder


@pytest.fixture
def start(peft, parts, mixture):
    """A separate worker whose adapters of experts have a B that is not zero, unless `grown` is false."""

    def started(kind="qwen3_moe", *, lora=None, hf=None, grown=True, **fields):
        section = {"lora": {"rank": 4, "target_parameters": EXPERTS, **(lora or {})}, **(hf or {})}
        given_fields = {"hf": section, "optimizer": ADAM, "max_total_sequence_length": 64, **fields}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(mixture(kind), **given_fields))
        worker.setup()
        if grown:
            grow(worker)
        return worker

    return started


def grow(worker, seed=3):
    """Draw all A and B at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in factors_of(worker).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def factors_of(worker):
    return {name: parameter for name, parameter in worker.model.model.named_parameters() if ".lora_" in name}


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def plain_model(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def scale_of(lora):
    rank, alpha = lora["rank"], lora.get("alpha", 32)
    return alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)


def summed(model, factors, lora):
    """The weights of a plain model plus s B A, expert by expert, as functions of the factors in peft's layout.

    peft wraps a module once for each of its tensors, in the order in which the module has them; the last wrapper is the
    outermost. The rows of A and the columns of B are [expert, rank] and [rank, expert].
    """
    rank, scale = lora["rank"], scale_of(lora)
    weights = dict(model.named_parameters())
    changed = {}
    for name, first in factors.items():
        if ".lora_A." not in name:
            continue
        second = factors[name.replace("lora_A", "lora_B")]
        module = name.partition(".lora_A.")[0]
        if ".experts" not in module:
            changed[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (second @ first)
            continue
        owner = model.get_submodule(module.replace(".base_layer", ""))
        wrapped = [key for key in ("gate_up_proj", "down_proj") if any(key in each for each in lora["target_parameters"])]
        key = wrapped[-1 - module.count(".base_layer")]
        tensor = weights[f"{module.replace('.base_layer', '')}.{key}"]
        added = [scale * second[:, at :: len(tensor)] @ first[at * rank : (at + 1) * rank] for at in range(len(tensor))]
        if getattr(owner, "is_transposed", False):
            added = [each.T for each in added]
        changed[f"{module.replace('.base_layer', '')}.{key}"] = tensor + torch.stack(added)
    return changed


def dense_logprobs(parts, folder, factors, lora, rows):
    model = plain_model(folder).requires_grad_(False)
    weights = summed(model, factors, lora)
    return parts.plain_logprobs(lambda ids, **given: functional_call(model, weights, (ids,), given), rows)


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
@each_variant
@each_mixture
def test_logprobs_and_gradients_are_those_of_the_sum_of_each_expert(parts, mixture, start, kind, variant, recomputes):
    lora, rows = VARIANTS[variant], parts.make_rows()
    worker = start(
        kind, lora=lora, activation_checkpointing=recomputes, optimizer=parts.SGD, max_grad_norm=None, train_micro_batch_size=3
    )
    before = copies(factors_of(worker))
    factors = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
    scored = dense_logprobs(parts, mixture(kind), factors, lora, rows)
    torch.testing.assert_close(worker.get_logprobs(rows)["logprobs"], scored.detach(), rtol=0, atol=1e-5)
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    (-(scored * mask * rows["weights"].unsqueeze(1)).sum() / mask.sum()).backward()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    found = parts.gradients_from(before, copies(factors_of(worker)))
    assert parts.largest_relative_error(found, {name: tensor.grad for name, tensor in factors.items()}) < 1e-5


@each_mixture
def test_before_the_first_step_policy_and_reference_are_the_base_bit_for_bit(parts, mixture, start, kind):
    rows = parts.make_rows()
    without = HFPolicyWorker(parts.make_context(), parts.make_config(mixture(kind), max_total_sequence_length=64))
    without.setup()
    worker = start(kind, grown=False)
    base = without.get_logprobs(rows)["logprobs"]
    assert torch.equal(worker.get_logprobs(rows)["logprobs"], base)
    assert list(worker.weight_manifest().items()) == list(without.weight_manifest().items())
    parts.train_steps(worker, 1, 2)
    assert not torch.equal(worker.get_logprobs(rows)["logprobs"], base)
    assert torch.equal(worker.get_logprobs(rows, reference=True)["logprobs"], base)


@each_variant
@each_mixture
def test_checkpoints_are_loaded_by_plain_peft_and_exports_are_its_merged_weights(
    peft, parts, mixture, start, tmp_path, kind, variant
):
    rows, lora = parts.make_rows(), VARIANTS[variant]
    worker = start(kind, lora=lora, grown=False)
    base = copies({name: each for name, each in worker.model.model.named_parameters() if ".lora_" not in name})
    before = copies(factors_of(worker))
    parts.train_steps(worker, 1, 2, 3)
    assert all(torch.equal(each, base[name]) for name, each in worker.model.model.named_parameters() if name in base)
    assert all(not torch.equal(each, before[name]) for name, each in factors_of(worker).items())
    worker.save_checkpoint(tmp_path / "w", None)
    model = peft.PeftModel.from_pretrained(plain_model(mixture(kind)), tmp_path / "w")
    scored = worker.get_logprobs(rows)["logprobs"]
    torch.testing.assert_close(scored, parts.plain_logprobs(model, rows).detach(), rtol=0, atol=1e-5)
    # Weights are exported under the names of the checkpoint, in which most families have experts one by one.
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected, found = load_file(tmp_path / "merged" / "model.safetensors"), dict(worker.iter_weights())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    changed = {name for name in found if not torch.equal(found[name], load_file(f"{mixture(kind)}/model.safetensors")[name])}
    assert {"expert" in name for name in changed} == ({True} if variant == "experts alone" else {True, False})


@each_mixture
def test_a_bfloat16_base_has_float32_adapters_and_is_summed_in_float32_and_rounded_once(parts, mixture, start, kind):
    worker = start(kind, precision="bfloat16", optimizer={"kwargs": {"lr": 1e-5}})
    before = copies(factors_of(worker))
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    parts.train_steps(worker, 1, 2)
    # A step of 1e-5 is less than bfloat16 resolves at the size of A.
    assert all(not torch.equal(tensor, before[name]) for name, tensor in factors_of(worker).items())
    model = plain_model(mixture(kind)).to(torch.bfloat16).float()
    expected = summed(model, copies(factors_of(worker)), {"rank": 4, "target_parameters": EXPERTS})
    whole = dict(worker._exported.iter_weights())
    for name, tensor in expected.items():
        # Sums in another order may be rounded to the neighbour: one unit in the last place of 8 bits.
        torch.testing.assert_close(whole[name].float(), tensor.detach(), rtol=2**-7, atol=1e-6)
        assert (whole[name] == tensor.to(torch.bfloat16)).float().mean() > 0.999


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_of_experts_of_a_bfloat16_base_have_gradients_near_those_of_a_float32_base(
    parts, mixture, peft, tmp_path, autocast
):
    plain_model(mixture("qwen3_moe")).to(torch.bfloat16).save_pretrained(tmp_path)
    found, rows = {}, parts.make_rows()
    for precision in ("float32", "bfloat16"):
        lora = {"rank": 4, "target_parameters": EXPERTS, "autocast": autocast and precision == "bfloat16"}
        fields = {"precision": precision, "optimizer": parts.SGD, "max_grad_norm": None, "max_total_sequence_length": 64}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path), hf={"lora": lora}, **fields))
        worker.setup()
        before = copies(factors_of(worker))
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        after = copies(factors_of(worker))
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        found[precision] = torch.cat([(before[name] - after[name]).flatten() for name in before if "experts" in name])
    # Rounding to 8 bits ten times in a row, and a router that chooses another expert where two are nearly equal.
    assert 0 < float((found["bfloat16"] - found["float32"]).norm() / found["float32"].norm()) < 0.1


def test_resumed_training_equals_uninterrupted_training(parts, start, tmp_path):
    straight = start(grown=False)
    parts.train_steps(straight, 1, 2)
    straight.save_checkpoint(tmp_path / "w", tmp_path / "o")
    expected = parts.train_steps(straight, 3, 4)
    resumed = start(grown=False, lora={"seed": 5})
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert parts.train_steps(resumed, 3, 4) == expected
    assert all(torch.equal(each, factors_of(straight)[name]) for name, each in factors_of(resumed).items())


@each_variant
def test_training_continues_the_adapter_of_a_peft_folder_with_its_settings(peft, parts, mixture, start, tmp_path, variant):
    lora, rows = VARIANTS[variant], parts.make_rows()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora["rank"],
            lora_alpha=lora.get("alpha", 32),
            use_rslora=lora.get("use_rslora", False),
            target_modules=lora.get("target_modules", ["q_proj", "v_proj"]),
            target_parameters=lora["target_parameters"],
            init_lora_weights=False,
        )
        model = peft.get_peft_model(plain_model(mixture("qwen3_moe")), config)
    model.save_pretrained(tmp_path)
    worker = HFPolicyWorker(
        parts.make_context(),
        parts.make_config(mixture("qwen3_moe"), hf={"lora": {"adapter_path": str(tmp_path)}}, max_total_sequence_length=64),
    )
    worker.setup()
    section = worker.config.hf_cfg.lora
    assert (section.rank, sorted(section.target_parameters)) == (lora["rank"], sorted(lora["target_parameters"]))
    scored = parts.plain_logprobs(model, rows).detach()
    torch.testing.assert_close(worker.get_logprobs(rows)["logprobs"], scored, rtol=0, atol=1e-5)
    with pytest.raises(
        UserError, match=r"target_parameters`: \['gate_up_proj'\] differs from the adapter in .*Remove target_par"
    ):
        start(lora={"adapter_path": str(tmp_path), "rank": lora["rank"], "target_parameters": ["gate_up_proj"]})


def test_a_checkpoint_with_other_experts_is_refused(parts, start, tmp_path):
    start().save_checkpoint(tmp_path, None)
    for lora, says in (
        ({"target_parameters": ["down_proj"]}, "a different adapter"),
        ({"target_parameters": []}, "exists in only one of the two"),
        ({"rank": 2}, "`r` is 4 there and 2 here"),
    ):
        with pytest.raises(CheckpointError, match=says):
            start(lora=lora, grown=bool(lora.get("target_parameters", True))).load_checkpoint(tmp_path, None)


@each_mixture
def test_a_merged_conversion_has_the_weights_of_a_refit(parts, mixture, start, tmp_path, kind):
    worker = start(kind)
    worker.save_checkpoint(tmp_path / "w", None)
    (tmp_path / "out").mkdir()
    policy = worker.config.model_dump(mode="json")
    to_folder(Conversion(source=tmp_path / "w", output=tmp_path / "out", policy=policy, merge=True))
    merged, sent = load_file(tmp_path / "out" / "model.safetensors"), dict(worker.iter_weights())
    assert merged.keys() == sent.keys()
    assert [name for name in sent if not torch.equal(sent[name], merged[name])] == []


def prompts(rows=6, width=12):
    ids = torch.randint(3, 160, (rows, width), generator=torch.Generator().manual_seed(1))
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), width), sample_seeds=torch.arange(rows))


@pytest.fixture
def connect(peft, mixture):
    """A policy, an engine and what connects them; closed at the end."""
    opened = []

    def make(kind="qwen3_moe", transport=SharedMemoryTransport, *, target="adapter", engine=HuggingFaceGeneration, **lora):
        folder = mixture(kind)
        sampler = HFGenerationConfig(max_new_tokens=20, lora=target)
        section = HFPolicyConfig(
            model_name=folder,
            max_total_sequence_length=64,
            hf_cfg={"lora": {"rank": 4, "target_parameters": EXPERTS, **lora}},
            optimizer=ADAM,
            generation=sampler,
        )
        policy = HuggingFacePolicy(config=section)
        made = make_canary(range(3, 160), num_receivers=1, max_length=64, exact=True)
        generation = engine(config=sampler.for_policy(section))
        # Less than the experts of a layer: a tensor that holds them arrives in pieces.
        sender = WeightSender(policy, transport, buffer_bytes=8192)
        sync = WeightSynchronizer(policy, generation, sender, canary=RefitCanary(lambda: made))
        opened.extend([sync.close, generation.shutdown, policy.shutdown])
        return policy, generation, sync

    yield make
    for close in opened:
        close()


def difference(policy, engine):
    """Mean |difference| of the log-probabilities of sampled tokens, in nats."""
    output = engine.generate(prompts())
    scores = policy.get_logprobs(rows_to_score(output))["logprobs"]
    return TokenDifferences(output["output_ids"], scores, output["logprobs"], compared=sampled_tokens(output)).mean


@pytest.mark.parametrize(
    ("target", "transport"),
    [
        ("adapter", SharedMemoryTransport),
        ("merged", SharedMemoryTransport),
        pytest.param("adapter", ByReferenceTransport, marks=pytest.mark.slow),
        pytest.param("merged", ByReferenceTransport, marks=pytest.mark.slow),
    ],
)
@each_mixture
def test_the_engine_computes_as_the_policy_after_each_refit(connect, parts, kind, target, transport):
    policy, engine, sync = connect(kind, transport, target=target)
    worker, sent = policy.group.worker, []
    for step in (1, 2, 3):
        parts.train_steps(worker, step)
        metrics = sync.sync()
        sent.append(metrics["refit/bytes"])
        assert metrics.get("refit/canary_error", 0.0) < 1e-5
        assert difference(policy, engine) < 1e-5
    if target == "adapter" and transport is SharedMemoryTransport:
        # A and B of a layer have a scale, which takes 64 bytes in the buffer.
        trained = sum(tensor.nbytes + 32 for tensor in factors_of(worker).values())
        base = sum(tensor.nbytes for name, tensor in worker.iter_weights() if ".lora_" not in name)
        assert sent[1:] == [trained, trained]
        assert sent[0] >= base + trained


def test_by_reference_frozen_experts_and_their_adapters_are_in_memory_once(connect, parts):
    policy, engine, sync = connect(transport=ByReferenceTransport)
    worker = policy.group.worker
    for step in (1, 2):
        parts.train_steps(worker, step)
        sync.sync()
        live = engine.group.worker.named_weights()
        sent = {name: tensor.data_ptr() for name, tensor in worker.iter_weights() if "scale" not in name}
        assert {name: live[name].data_ptr() for name in sent} == sent
        assert any(name.endswith("experts.gate_up_proj_lora.lora_A.weight") for name in sent)


class Wrong(DistributedGeneration):
    """An engine that computes wrongly with the adapters of experts that it has received and digested."""

    class Worker(HFGenerationWorker):
        def expect_adapters(self, ranks):
            super().expect_adapters(ranks)
            for module in self.model.modules():
                if hasattr(module, "gate_up_proj_lora") and not hasattr(module, "is_wrong"):
                    module.is_wrong = True
                    module.register_forward_pre_hook(self.change)

        def change(self, experts, _):
            for key in ("gate_up_proj", "down_proj"):
                vars(experts)[key] = self.changed(vars(experts)[key])

        def changed(self, adapted):
            return adapted

    def __init__(self, *, config):
        super().__init__(worker_class=self.Worker, config=config)

    @property
    def tokenizer_section(self):
        return self.config.hf_cfg.tokenizer


class Right(Wrong):
    """The right control."""


class LeavesOutTheScale(Wrong):
    class Worker(Wrong.Worker):
        def changed(self, adapted):
            return dataclasses.replace(adapted, scale=1.0)


class SwapsExperts(Wrong):
    """Adds the adapters of each expert to the next one."""

    class Worker(Wrong.Worker):
        def changed(self, adapted):
            return dataclasses.replace(adapted, left=adapted.left.roll(1, 0), right=adapted.right.roll(1, 0))


class ComputesWithTheBase(Wrong):
    class Worker(Wrong.Worker):
        def changed(self, adapted):
            return adapted.weight


@pytest.mark.parametrize("engine", [Right, LeavesOutTheScale, SwapsExperts, ComputesWithTheBase])
def test_the_canary_stops_engines_that_compute_wrongly_with_adapters_of_experts(connect, parts, engine):
    policy, _, sync = connect(engine=engine)
    assert sync.sync()["refit/canary_error"] < 1e-5, "B is 0, so nothing can be seen yet"
    parts.train_steps(policy.group.worker, 1, 2)
    if engine is Right:
        assert sync.sync()["refit/canary_error"] < 1e-5
        return
    with pytest.raises(WeightSyncError, match="computes log-probabilities that differ"):
        sync.sync()


def test_adapters_of_experts_that_fit_no_tensor_are_refused_by_the_engine(connect, parts):
    policy, engine, sync = connect()
    parts.train_steps(policy.group.worker, 1)
    sync.sync()
    manifest = policy.group.worker.weight_manifest()
    layer = "model.layers.0.mlp.experts.down_proj_lora"
    (rows, width), dtype = manifest[f"{layer}.lora_A.weight"]
    worker = engine.group.worker
    with pytest.raises(WeightSyncError, match=re.escape(layer)):
        worker.prepare_refit_info({**manifest, f"{layer}.lora_A.weight": ((rows, width + 1), dtype)})
    unknown = {name.replace("down_proj_lora", "gate_lora"): form for name, form in manifest.items() if "down_proj_lora" in name}
    with pytest.raises(WeightSyncError, match="no linear layer of that name"):
        worker.prepare_refit_info({**manifest, **unknown})


def test_only_the_engine_hf_computes_with_adapters_of_experts(mixture):
    section = {"model_name": mixture("qwen3_moe"), "hf_cfg": {"lora": {"target_parameters": EXPERTS}}}
    assert HFPolicyConfig(**section, generation={"backend": "hf"}).adapter_problem is None
    other = HFPolicyConfig(**section, generation={"backend": "vllm"})
    assert other.adapter_problem == (
        "only the engine `hf` computes with adapters of experts (policy.hf_cfg.lora.target_parameters)"
    )


FUSED = "Its experts are fused, and adapted with target_parameters: [experts.down_proj, experts.gate_up_proj]."


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            {"target_parameters": ["experts.gate_proj"]},
            "'experts.gate_proj' matches no tensor of the model. Did you mean 'experts.gate_up_proj'? Tensors of its experts "
            "are experts.down_proj, experts.gate_up_proj.",
        ),
        ({"target_parameters": ["q_proj.weight"]}, "which does not stack the experts of a layer. Linear layers belong in"),
        ({"target_modules": ["experts"], "target_parameters": []}, FUSED),
        ({"target_modules": ["gate_up_proj"], "target_parameters": []}, FUSED),
        ({"target_modules": ["gate_proj"], "target_parameters": []}, FUSED),
    ],
)
def test_names_that_are_not_tensors_of_experts_are_explained(start, lora, says):
    with pytest.raises(UserError) as caught:
        start(lora=lora)
    assert says in str(caught.value)


def test_a_model_without_experts_is_refused(peft, parts, model_folder):
    lora = {"target_parameters": ["experts.down_proj"]}
    with pytest.raises(UserError, match="LlamaForCausalLM has no tensor that stacks the experts of a layer") as caught:
        HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("llama"), hf={"lora": lora})).setup()
    assert caught.value.key == "policy.hf_cfg.lora.target_parameters"


@pytest.mark.parametrize(
    ("hf", "says"),
    [
        ({"lora": {"target_modules": []}}, "nothing would be trained"),
        ({"lora": {"target_parameters": EXPERTS, "use_dora": True}}, "use_dora cannot be combined with target_parameters"),
        ({"lora": {"target_parameters": EXPERTS, "dropout": 0.1}}, "dropout cannot be combined with target_parameters"),
        (
            {"lora": {"target_parameters": EXPERTS}, "compile_layers": True},
            "compile_layers cannot be combined with lora.target_par",
        ),
    ],
)
def test_what_cannot_be_combined_with_adapters_of_experts_is_an_error_with_a_reason(hf, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        HFConfig(**hf)


def test_muon_is_refused_for_adapters_of_experts_with_the_place_in_the_config(peft, tmp_path):
    changes = {"hf_cfg": {"lora": {"target_parameters": EXPERTS}}, "optimizer": {"name": "torch.optim.Muon"}}
    quickstart = ADDITION.parents[1] / "grpo_addition.yaml"
    (tmp_path / "run.yaml").write_text(json.dumps({"defaults": str(quickstart), "policy": changes}))
    with pytest.raises(
        ConfigError, match=r"run\.yaml.*policy\.hf_cfg\.lora\.target_parameters: Muon cannot update adapters of exp"
    ):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_plan_counts_the_adapters_of_experts(mixture, peft, parts, precision):
    shape = {"ranks": 1, "several": True, "score": None, "reference": True, "on_gpu": True}
    planned, sizes = {}, {}
    for targets, train in (((), None), (EXPERTS, (4, 24))):
        lora = {"rank": 4, "target_parameters": targets}
        config = parts.make_config(mixture("qwen3_moe"), hf={"lora": lora}, precision=precision, optimizer=ADAM)
        memory = PolicyMemory(config)
        planned[len(targets)], sizes[len(targets)] = memory.by_phase(**shape, train=train), memory.matrix_sizes()
    # 2 layers, 4 experts, rank 4: gate and up [48, 32], down [32, 24].
    added = 2 * 4 * 4 * (48 + 32 + 32 + 24)
    (without, adapted), (before, after) = planned.values(), sizes.values()
    assert adapted["held"]["optimizer state"] - without["held"]["optimizer state"] == 8 * added
    assert adapted["held"]["weights"] - without["held"]["weights"] == 4 * added
    assert adapted["update"]["gradients"] == adapted["held"]["optimizer state"] / 2
    assert adapted["train"]["activations"] > 0
    # A token is multiplied with the adapters of the experts that are chosen for it, 2 of 4.
    assert after["trained"] - before["trained"] == added // 2
    assert after["frozen"] == before["frozen"]


def test_adapters_of_experts_are_trained_next_to_a_quantized_base(parts, mixture, start):
    pytest.importorskip("bitsandbytes")
    worker = start(hf={"load_in_4bit": True}, grown=False, precision="bfloat16")
    rows = parts.make_rows()
    initial = worker.get_logprobs(rows)["logprobs"]
    before = copies(factors_of(worker))
    parts.train_steps(worker, 1, 2)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in factors_of(worker).items())
    assert torch.equal(worker.get_logprobs(rows, reference=True)["logprobs"], initial)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@each_mixture
def test_experts_that_are_not_computed_with_grouped_products_have_the_same_adapters(parts, start, kind, implementation):
    rows, found = parts.make_rows(), {}
    for each in ("grouped_mm", implementation):
        worker = start(kind, optimizer=parts.SGD, max_grad_norm=None)
        worker.model.model.set_experts_implementation(each)
        scores, before = worker.get_logprobs(rows)["logprobs"], copies(factors_of(worker))
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        found[each] = scores, parts.gradients_from(before, copies(factors_of(worker)))
    torch.testing.assert_close(found[implementation][0], found["grouped_mm"][0], rtol=0, atol=1e-5)
    # W + s B A is rounded to float32 before the product instead of after it.
    assert parts.largest_relative_error(found[implementation][1], found["grouped_mm"][1]) < 1e-4


@pytest.fixture(scope="module")
def adding_mixture(tmp_path_factory):
    """The folder of a random mixture with the tokenizer of the model that adds numbers."""
    folder = tmp_path_factory.mktemp("adding")
    with torch.random.fork_rng():
        torch.manual_seed(9)
        tokens = json.loads((ADDITION / "config.json").read_text())
        ids = {key: tokens[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        config = transformers.Qwen3MoeConfig(**{**SHAPE, **ids}, num_experts=4, moe_intermediate_size=24)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ADDITION / name, folder)
    return folder


@pytest.mark.slow
def test_a_run_sends_adapters_of_experts_resumes_bit_for_bit_and_is_converted(peft, adding_mixture, tmp_path, monkeypatch):
    (tmp_path / "rewards_of_experts.py").write_text("def short(completion):\n    return -float(len(completion))\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(name, steps):
        config = {
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": steps},
            "policy": {
                "backend": "hf",
                "model_name": str(adding_mixture),
                "precision": "bfloat16",
                "max_total_sequence_length": 16,
                "optimizer": ADAM,
                "hf_cfg": {"lora": {"rank": 4, "target_parameters": EXPERTS}},
                "generation": {"backend": "hf", "max_new_tokens": 5},
            },
            # Random answers are never right, so the reward is their length.
            "env": {"arithmetic": {"reward_fns": {"short": "rewards_of_experts.short"}}},
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 64, "min_digits": 2}},
            "cluster": {"backend": "in_process"},
            "checkpointing": {"save_period": 1},
            "logger": {"log_dir": str(tmp_path / name), "run_name": "run"},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        finished = launch(tmp_path / f"{name}.json", console=False)
        return finished.folder / "checkpoints" / f"step_{steps:06d}"

    straight = run("straight", 2)
    run("resumed", 1)
    resumed = run("resumed", 2)
    saved = [load_file(step / "policy" / "weights" / "adapter_model.safetensors") for step in (straight, resumed)]
    assert saved[0].keys() == saved[1].keys()
    assert [name for name, tensor in saved[0].items() if not torch.equal(tensor, saved[1][name])] == []
    assert all(tensor.any() for name, tensor in saved[0].items() if "lora_B" in name), "every tensor was trained"
    assert "policy.generation.lora: adapter" in (straight.parents[1] / "logs" / "driver.log").read_text()
    convert(straight, tmp_path / "merged", to="hf", merge=True)
    convert(straight, tmp_path / "adapter", to="hf", adapter=True)
    ids = torch.tensor([[3, 4, 5, 6]])
    model = peft.PeftModel.from_pretrained(plain_model(adding_mixture, torch.bfloat16).float(), tmp_path / "adapter")
    merged = plain_model(tmp_path / "merged").float()
    # Merged weights are rounded to 8 bits.
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=0.05, atol=0.05)


def test_a_saved_config_names_the_experts_in_a_fixed_order(start, tmp_path):
    start().save_checkpoint(tmp_path, None)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_parameters"] == sorted(EXPERTS)
    assert not saved["rank_pattern"]


@given(
    sizes=st.tuples(*(st.integers(1, 5).map(lambda size: 4 * size) for _ in range(2))),
    experts=st.integers(2, 5),
    rank=st.integers(1, 9),
    counts=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_products_indexing_and_sums_of_an_adapted_weight_are_those_of_w_plus_s_b_a(
    sizes, experts, rank, counts, transposed, seed
):
    generator = torch.Generator().manual_seed(seed)
    (size_in, size_out), counts = sizes, counts[:experts]

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    weight, a, b = draw(experts, size_out, size_in), draw(experts * rank, size_in), draw(size_out, rank * experts)
    whole = torch.stack(
        [
            weight[at].double() + 0.5 * b[:, at::experts].double() @ a[at * rank : (at + 1) * rank].double()
            for at in range(experts)
        ]
    )
    module = torch.nn.Module()
    module.is_transposed = transposed
    if transposed:
        weight, whole = weight.mT.contiguous(), whole.mT
    adapted = AdaptedWeight.of(module, weight, a, b, scale=0.5)
    # Sums of at most 20 products of normal numbers, in float32.
    close = {"rtol": 1e-5, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(adapted.total(), whole, **close)
    torch.testing.assert_close(adapted[1], whole[1], **close)
    torch.testing.assert_close(adapted[torch.tensor([1, 0, 1])], whole[[1, 0, 1]], **close)
    torch.testing.assert_close(
        torch.bmm(adapted, torch.ones(experts, adapted.shape[2], 1)), whole.sum(2, keepdim=True), **close
    )
    x, offsets = draw(sum(counts), size_in), torch.tensor(counts).cumsum(0).int()
    forward, exact = (adapted, whole) if transposed else (adapted.transpose(-2, -1), whole.mT)
    found = torch.nn.functional.grouped_mm(x, forward, offs=offsets)
    expected = torch.cat([rows @ exact[at] for at, rows in enumerate(x.double().split(counts))])
    torch.testing.assert_close(found, expected, **close)


def test_merged_adapters_of_experts_are_not_added_again_in_later_calls(start):
    worker, ids = start(), torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        adapted = worker.model.model(input_ids=ids).logits
        worker._adapters.merge_and_unload()
        # W + s B A is rounded to float32 before the product instead of after it.
        torch.testing.assert_close(worker.model.model(input_ids=ids).logits, adapted, rtol=0, atol=1e-4)
