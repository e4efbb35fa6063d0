"""LoRA on one rank: the config, refits of an engine, checkpoints that peft loads, scalar heads, and what is refused."""

import json
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rl_backends_hf import HuggingFaceGeneration
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_core.errors import CheckpointError, NotSupportedError, UserError, WorkerError
from rl_train.launch.train import train as launch
from rl_train.run_folders.convert import convert
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

pytestmark = pytest.mark.megatron
MODEL = str(Path(__file__).parents[2] / "examples" / "addition" / "model")
ADAM = {"kwargs": {"lr": 1e-2}}


def steps(policy, count=2):
    policy.prepare_for_training()
    return [policy.train(cases.make_rows(seed=number), cases.NLL()) for number in range(count)]


def adapters_of(policy):
    return {name: tensor.clone() for name, tensor in policy.group.worker._model.adapters.export()}


def base_of(policy):
    chunks = policy.group.worker._model.chunks.modules
    return {name: each.clone() for chunk in chunks for name, each in chunk.named_parameters() if "adapters" not in name}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"r": 8}, "`r` is called `rank` here"),
        ({"enabled": True}, "there is no `enabled`"),
        ({"dropout": 0.1}, "dropout is only supported by the backend `hf`"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is only supported by the backend `hf`"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["linear_qkv"]}, "linear_qkv consists of q_proj, k_proj and v_proj"),
    ],
)
def test_an_invalid_section_is_an_error_with_the_key_to_use(section, says):
    with pytest.raises(ValueError, match=says):
        MegatronConfig(lora=section)


@pytest.mark.parametrize("field", [{"transformer_impl": "transformer_engine"}, {"moe_grouped_gemm": True}])
def test_layers_that_are_fused_with_their_norm_cannot_be_adapted(field):
    with pytest.raises(ValueError, match="cannot be combined with lora"):
        MegatronConfig(lora={}, **field)


@pytest.mark.parametrize(
    ("kind", "section", "says"),
    [
        ("llama", {"target_modules": ["q_prj"]}, r"'q_prj' matches no module of the model\. Did you mean .*q_proj"),
        ("llama", {"target_modules": r".*\.(q|"}, "is not a regular expression"),
        ("llama", {"target_modules": ["lm_head"]}, "lm_head is not a linear layer of a block"),
        ("llama", {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "exclude_modules excludes all"),
        ("qwen3-moe", {"target_modules": ["q_proj", "up_proj"]}, r"layers\.0\.mlp\.experts\.0\.up_proj belongs to an expert"),
        ("mixtral", {"target_modules": ["w1"]}, "belongs to an expert of a mixture, which the Megatron backend does not adapt"),
    ],
)
def test_layers_that_cannot_be_adapted_are_named_before_anything_starts(models, kind, section, says):
    from rl_backends_megatron import MegatronPolicy

    with pytest.raises((UserError, NotSupportedError), match=says):
        MegatronPolicy(str(models / kind), lora=section)
    config = MegatronPolicyConfig(model_name=str(models / kind), megatron_cfg={"lora": section})
    with pytest.raises((UserError, NotSupportedError), match=says):
        list(config.deep_conflicts(None))


def test_the_command_reports_an_unknown_layer_with_its_line_and_exit_code_2(rlcore, tmp_path):
    config = {
        "sft": {"max_num_steps": 1, "global_batch_size": 8},
        "policy": {
            "backend": "megatron",
            "model_name": MODEL,
            "max_total_sequence_length": 16,
            "megatron_cfg": {"lora": {"target_modules": ["q_prj"]}},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 32, "with_response": True}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config, indent=1))
    code, output = rlcore("validate", tmp_path / "run.yaml")
    assert code == 2
    assert "policy.megatron_cfg.lora.target_modules" in output
    assert "'q_prj' matches no layer" in output
    assert "q_proj" in output


def test_tensor_parallel_ranks_that_share_a_key_head_cannot_adapt_it(models):
    from rl_backends_megatron.families import FAMILIES
    from rl_backends_megatron.lora import _rows_of
    from rl_backends_megatron.model import sizes_of

    class TwoRanks:
        class tensor:
            size = staticmethod(lambda: 2)

    weight = next(each for each in FAMILIES["qwen2"].weights if each.megatron[0].endswith("linear_qkv.weight"))
    hf = transformers.AutoConfig.from_pretrained(models / "qwen2")  # one key head
    with pytest.raises(NotSupportedError, match=r"exclude_modules: \[q_proj, k_proj, v_proj\]"):
        _rows_of(weight, None, sizes_of(hf), TwoRanks)


@pytest.mark.parametrize("transport", [ByReferenceTransport, SharedMemoryTransport])
@pytest.mark.parametrize("target", ["adapter", "merged"])
def test_an_engine_computes_as_the_policy_after_each_refit(models, policy, tmp_path, transport, target):
    made = policy("qwen2", lora={"rank": 4}, optimizer=ADAM, generation={"backend": "hf", "lora": target})
    engine = HuggingFaceGeneration(str(models / "qwen2"), max_new_tokens=8, torch_dtype="float32", lora=target)
    rows = make_canary(range(3, 160), num_receivers=1, max_length=64, exact=True)
    sender = WeightSender(made, transport, folder=tmp_path)
    sync = WeightSynchronizer(made, engine, sender, canary=RefitCanary(lambda: rows))
    try:
        base = base_of(made)
        for step in range(2):
            steps(made, 1)
            metrics = sync.sync()
            if step == 0 or target == "adapter":
                assert metrics["refit/canary_error"] < 1e-5
            assert sender.sends_adapters == (target == "adapter")
        assert [name for name, tensor in base_of(made).items() if not torch.equal(tensor, base[name])] == []
    finally:
        sync.close()
        engine.shutdown()


def test_a_bfloat16_base_has_float32_adapters_and_equals_its_base_before_the_first_step(models, policy):
    rows = cases.make_rows()
    made = policy("llama-tied", lora={"rank": 4}, precision="bfloat16", optimizer=ADAM)
    scored = [made.get_logprobs(rows)["logprobs"], made.get_reference_policy_logprobs(rows)["reference_logprobs"]]
    assert torch.equal(scored[0], scored[1])
    worker = made.group.worker
    steps(made)
    assert not torch.equal(made.get_logprobs(rows)["logprobs"], scored[0])
    again = made.get_reference_policy_logprobs(rows)["reference_logprobs"]
    assert torch.equal(again, scored[0]), "the reference is the base"
    assert worker._reference is None, "without a second copy of the weights"
    assert {tensor.dtype for tensor in adapters_of(made).values()} == {torch.float32}
    state = list(worker.state.named_state())
    trained = sum(tensor.numel() for name, tensor in adapters_of(made).items() if not name.endswith("scale"))
    assert sum(tensor.numel() for name, tensor in state if name.startswith("float32 ")) == trained
    assert sum(tensor.numel() for name, tensor in state if name.startswith("exp_avg ")) == trained
    name = "model.layers.1.mlp.down_proj"
    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama-tied", dtype=torch.bfloat16).state_dict()
    adapter = adapters_of(made)
    expected = base[f"{name}.weight"].float() + 8 * (adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"])
    assert torch.equal(dict(worker.iter_weights())[f"{name}.weight"], expected.bfloat16()), "summed in float32, rounded once"


@pytest.mark.parametrize("recompute", [{}, {"activation_checkpointing": True}])
def test_a_section_with_an_expression_trains_only_the_layers_that_match_as_the_backend_hf(models, policy, tmp_path, recompute):
    section = {"rank": 3, "alpha": 7, "use_rslora": True, "target_modules": r".*\.(k|v|up)_proj"}
    section["exclude_modules"] = ["layers.0.self_attn.v_proj"]
    rows, fields = cases.make_rows(), {"optimizer": ADAM, "train_micro_batch_size": 3, **recompute}
    made = policy("qwen2", lora=section, **fields)
    made.save_checkpoint(tmp_path / "first")
    peer = HFPolicyWorker(
        cases.make_context(), HFPolicyConfig(model_name=str(models / "qwen2"), hf_cfg={"lora": section}, **fields)
    )
    peer.setup()
    peer.load_checkpoint(tmp_path / "first", None)
    for _ in range(3):
        mine = made.train(rows, cases.NLL())
        other = peer.train(rows, cases.NLL(), counts=cases.counts_of(rows))[0]
        assert mine["grad_norm"] == pytest.approx(other.grad_norm, rel=1e-5)
    assert len(adapters_of(made)) == 3 * (3 * 4 - 1)
    peer.save_checkpoint(tmp_path / "peer", None)
    made.save_checkpoint(tmp_path / "mine")
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("mine", "peer")]
    # Adam divides by the gradient's own size, so rounding in small gradients comes through whole.
    assert cases.largest_relative_error(*saved) < 5e-4
    config = json.loads((tmp_path / "mine" / "adapter_config.json").read_text())
    theirs = json.loads((tmp_path / "peer" / "adapter_config.json").read_text())
    for written in (config, theirs):
        written["target_modules"].sort()
    assert {key: theirs[key] for key in config} == config


def test_checkpoints_have_adapters_only_and_resume_bit_for_bit(policy, tmp_path):
    made = policy("qwen3", lora={"rank": 4}, optimizer=ADAM)
    steps(made)
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    assert sorted(file.name for file in (tmp_path / "w").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    steps(made, 1)
    expected = adapters_of(made)
    made.try_save(tmp_path / "tried")
    assert [file.name for file in (tmp_path / "tried").iterdir()] == ["adapter_config.json"]
    made.shutdown()
    resumed = policy("qwen3", lora={"rank": 4, "seed": 9}, optimizer=ADAM)
    assert not torch.equal(next(iter(adapters_of(resumed).values())), next(iter(expected.values())))
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    steps(resumed, 1)
    for name, tensor in adapters_of(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    resumed.shutdown()
    for section, says in [
        ({"rank": 8}, "`r` is 4 there and 8 here"),
        ({"rank": 4, "target_modules": ["q_proj"]}, "exists in only one of the two"),
        (None, r"it has an adapter; resume with the `policy\.megatron_cfg\.lora` that wrote it"),
    ]:
        other = policy("qwen3", lora=section, optimizer=ADAM)
        with pytest.raises(CheckpointError, match=says):
            other.load_checkpoint(tmp_path / "w", None)
        other.shutdown()


def test_a_scalar_head_is_trained_and_saved_in_full_with_the_adapters(policy, tmp_path):
    rows = cases.make_rows()
    made = policy("llama-tied-value", lora={"rank": 4}, head="scalar", precision="bfloat16", optimizer=ADAM)
    before = made.get_values(rows)["values"]
    made.prepare_for_training()
    made.train(rows, cases.SquaredError())
    after = made.get_values(rows)["values"]
    assert not torch.equal(after, before)
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    saved = load_file(tmp_path / "w" / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].dtype == torch.float32
    made.shutdown()
    resumed = policy("llama-tied-value", lora={"rank": 4, "seed": 3}, head="scalar", precision="bfloat16", optimizer=ADAM)
    assert torch.equal(resumed.get_values(rows)["values"], before), "new adapters keep the head of the model"
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert torch.equal(resumed.get_values(rows)["values"], after)


@pytest.fixture
def run(tmp_path):
    """The checkpoint of a run of two steps."""
    config = {
        "sft": {"max_num_steps": 2, "global_batch_size": 8},
        "policy": {
            "backend": "megatron",
            "model_name": MODEL,
            "max_total_sequence_length": 16,
            "megatron_cfg": {"lora": {"rank": 4, "alpha": 8}},
            "optimizer": ADAM,
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 32, "with_response": True}},
        "cluster": {"backend": "in_process"},
        "logger": {"log_dir": str(tmp_path)},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return launch(tmp_path / "run.yaml", console=False).folder / "checkpoints" / "step_000002"


def test_a_run_is_exported_as_an_adapter_that_peft_loads_and_as_a_merged_model(run, tmp_path, policy):
    peft = pytest.importorskip("peft")
    convert(run, tmp_path / "adapter", to="hf", adapter=True)
    convert(run, tmp_path / "merged", to="hf", merge=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    rows = torch.randint(3, base.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        adapted, plain = loaded(rows).logits, merged(rows).logits
        with loaded.disable_adapter():
            assert float((adapted - loaded(rows).logits).abs().max()) > 1e-3
    assert float((adapted - plain).abs().max()) < 1e-4  # merged sums are rounded before they are multiplied
    transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    section = {"adapter_path": str(tmp_path / "adapter")}
    continued = policy(MODEL, lora=section)
    assert continued.group.worker.config.megatron_cfg.lora.rank == 4, "read from the adapter"
    for name, tensor in continued.group.worker.iter_weights():
        assert torch.equal(tensor, merged.state_dict()[name]), name
    continued.shutdown()
    with pytest.raises(WorkerError, match="8 differs from the adapter"):
        policy(MODEL, lora={**section, "rank": 8}).wait_ready()
