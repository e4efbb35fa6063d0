"""The life of an adapter: a run continues one from a folder, its folders name their base, and other libraries load them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_backends_hf.config import HFPolicyConfig, LoRAConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.model_digests import weights_digest
from rl_core.errors import ConfigError, UserError
from rl_train.config.loader import load_config
from rl_train.launch.train import train as launch
from rl_train.run_folders.convert import convert

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "addition" / "model"
ADAM = {"kwargs": {"lr": 1e-2}}
LAYERS = ["q_proj", "v_proj"]


@pytest.fixture
def start(peft, parts, model_folder):
    """A separate worker with adapters on a tiny model."""

    def started(kind="llama-tied", *, lora=None, **fields):
        given = {"hf": {"lora": lora or {}}, "optimizer": ADAM, **fields}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), **given))
        worker.setup()
        return worker

    return started


def plain_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def peft_folder(peft, base, out, **settings):
    """An adapter with random A and B, created and saved by plain peft, and its model."""
    given = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 7, "target_modules": LAYERS, **settings}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(plain_model(base), peft.LoraConfig(**given))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.rand(parameter.shape))
    model.save_pretrained(out)
    return model


def adapters_of(worker):
    return {name: tensor.clone() for name, tensor in worker.trained_weights()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "target_modules": r".*layers\.1.*_proj"},
        {"use_dora": True, "exclude_modules": ["layers.0.self_attn.v_proj"]},
    ],
)
def test_training_continues_the_adapter_of_a_peft_folder_with_its_settings(
    peft, parts, model_folder, start, tmp_path, settings
):
    model = peft_folder(peft, model_folder("llama-tied"), tmp_path, **settings)
    worker = start(lora={"adapter_path": str(tmp_path)})
    rows = parts.make_rows()
    scored = parts.plain_logprobs(model, rows)
    torch.testing.assert_close(worker.get_logprobs(rows)["logprobs"], scored.detach(), rtol=0, atol=1e-5)
    base = parts.plain_logprobs(plain_model(model_folder("llama-tied")), rows).detach()
    reference = worker.get_logprobs(rows, reference=True)["logprobs"]
    torch.testing.assert_close(reference, base, rtol=0, atol=1e-5)
    assert (scored - base).abs().max() > 0.01
    lora = worker.config.hf_cfg.lora
    assert (lora.rank, lora.alpha, lora.use_rslora) == (3, 7, settings.get("use_rslora", False))
    before = adapters_of(worker)
    parts.train_steps(worker, 1)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in adapters_of(worker).items())


def test_a_continued_run_equals_one_that_loads_the_weights_of_the_checkpoint(parts, start, tmp_path):
    first = start(lora={"rank": 4, "use_dora": True})
    parts.train_steps(first, 1, 2)
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    continued = start(lora={"adapter_path": str(tmp_path / "w"), "seed": 9})
    loaded = start(lora={"rank": 4, "use_dora": True})
    loaded.load_checkpoint(tmp_path / "w", None)
    assert parts.train_steps(continued, 3, 4) == parts.train_steps(loaded, 3, 4)
    assert all(torch.equal(tensor, adapters_of(loaded)[name]) for name, tensor in adapters_of(continued).items())


def test_a_scalar_head_is_continued_with_its_adapter_and_starts_at_zero_with_the_adapter_of_a_policy(
    peft, parts, model_folder, start, tmp_path
):
    fields = {"head": "scalar"}
    first = start(lora={"rank": 2}, **fields)
    with torch.no_grad():
        first._adapters._head.weight.add_(0.5)
    first.save_checkpoint(tmp_path / "scalar", None)
    rows = parts.make_rows()
    continued = start(lora={"adapter_path": str(tmp_path / "scalar")}, **fields)
    assert torch.equal(continued.get_values(rows)["values"], first.get_values(rows)["values"])
    peft_folder(peft, model_folder("llama-tied"), tmp_path / "tokens")
    new = start(lora={"adapter_path": str(tmp_path / "tokens")}, **fields)
    assert not new.get_values(rows)["values"].any()
    saved = load_file(tmp_path / "tokens" / "adapter_model.safetensors")
    for name, tensor in new._adapters._tensors().items():
        assert name not in saved or torch.equal(tensor, saved[name])
    with pytest.raises(UserError, match=r"adapter_path`: .* has modules_to_save: \['score'\], which is not supported"):
        start(lora={"adapter_path": str(tmp_path / "scalar")})


def config_of(folder, **lora):
    """The quickstart with the adapter of a folder."""
    path = folder / "run.yaml"
    values = {"defaults": str(ROOT / "examples" / "grpo_addition.yaml"), "policy": {"hf_cfg": {"lora": lora}}}
    path.write_text(json.dumps(values))
    return path


def test_values_that_are_not_set_are_those_of_the_folder(peft, tmp_path):
    peft_folder(peft, MODEL, tmp_path / "adapter", use_rslora=True)
    loaded = load_config(config_of(tmp_path, adapter_path="adapter", dropout=0.0))
    lora = loaded.run.policy.hf_cfg.lora
    assert (lora.rank, lora.alpha, sorted(lora.target_modules), lora.use_rslora) == (3, 7, LAYERS, True)
    assert lora.adapter_path == str(tmp_path / "adapter")
    assert loaded.resolved["policy"]["hf_cfg"]["lora"]["rank"] == 3
    shutil.rmtree(tmp_path / "adapter")
    assert LoRAConfig(**lora.model_dump()) == lora, "the config of a checkpoint is complete without the folder"


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 4}, r"lora\.rank.*4 differs from the adapter in .*adapter, which has `r: 3`"),
        ({"alpha": 8}, r"lora\.alpha.*8 differs from .*`lora_alpha: 7`"),
        ({"use_dora": True}, r"lora\.use_dora.*True differs from .*`use_dora: False`"),
        ({"target_modules": ["q_proj"]}, r"does not include model\.layers\.0\.self_attn\.v_proj, which the adapter in"),
        ({"target_modules": [*LAYERS, "o_proj"]}, r"'o_proj' is not adapted in"),
        ({"exclude_modules": ["q_proj"]}, r"does not include model\.layers\.0\.self_attn\.q_proj"),
    ],
)
def test_values_that_differ_from_the_folder_are_errors_that_name_both(peft, tmp_path, lora, says):
    peft_folder(peft, MODEL, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=rf"run\.yaml.*policy\.hf_cfg\.{says}" if says.startswith("lora") else says):
        load_config(config_of(tmp_path, adapter_path="adapter", **lora))
    load_config(config_of(tmp_path, adapter_path="adapter", rank=3, target_modules=r".*\.(q|v)_proj"))


def change_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"peft_type": "LOHA"}, "has peft_type: LOHA, which is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, "has modules_to_save: ['embed_tokens']"),
        ({"bias": "all"}, "has bias: all"),
        ({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 1}}, "has rank_pattern: {'q_proj': 8}, alpha_pattern:"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights: pissa_niter_4"),
        ({"r": 5}, "lora_A.weight with rank 3 instead of `r: 5`"),
    ],
)
def test_unsupported_settings_of_a_folder_are_named_before_a_model_is_loaded(peft, tmp_path, values, says):
    peft_folder(peft, MODEL, tmp_path / "adapter")
    change_config(tmp_path / "adapter", **values)
    with pytest.raises(ConfigError) as refused:
        load_config(config_of(tmp_path, adapter_path="adapter"))
    assert says in str(refused.value)
    assert "policy.hf_cfg.lora.adapter_path" in str(refused.value)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_an_embedding_or_the_head_are_named_by_their_tensor(peft, tmp_path, target):
    peft_folder(peft, MODEL, tmp_path / "adapter", target_modules=[target])
    with pytest.raises(ConfigError, match=rf"has the tensor \S*{target}\S*, which is not supported"):
        load_config(config_of(tmp_path, adapter_path="adapter"))


def test_a_folder_that_is_missing_incomplete_or_a_model_is_an_error_with_its_key(peft, tmp_path):
    key = r"policy\.hf_cfg\.lora\.adapter_path"
    with pytest.raises(ConfigError, match=rf"{key}.*does not exist"):
        load_config(config_of(tmp_path, adapter_path="./adapter"))
    with pytest.raises(ConfigError, match=rf"{key}.*acme/adapter is neither an adapter folder nor an adapter on the hub"):
        load_config(config_of(tmp_path, adapter_path="acme/adapter"))
    with pytest.raises(ConfigError, match=rf"{key}.*is not an adapter in peft's format. It contains a full model: use it as"):
        load_config(config_of(tmp_path, adapter_path=str(MODEL)))
    weights = tmp_path / "run" / "checkpoints" / "step_000002" / "policy" / "weights"
    peft_folder(peft, MODEL, weights)
    with pytest.raises(
        ConfigError, match=rf"{key}.*has no adapter_config\.json.* The weights of a checkpoint are in {weights}"
    ):
        load_config(config_of(tmp_path, adapter_path="run"))
    (weights / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ConfigError, match=rf"{key}.*Cannot read \S+: it has no header of safetensors"):
        load_config(config_of(tmp_path, adapter_path=str(weights)))
    peft_folder(peft, MODEL, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ConfigError, match=rf"{key}.*An adapter_model\.bin is not read"):
        load_config(config_of(tmp_path, adapter_path="adapter"))


def test_an_adapter_of_the_hub_is_read_from_its_cache(peft, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "b" * 40
    stored = tmp_path / "hub" / "models--acme--adapter"
    peft_folder(peft, MODEL, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    for name in ("acme/adapter", f"acme/adapter@{commit}"):
        lora = load_config(config_of(tmp_path, adapter_path=name)).run.policy.hf_cfg.lora
        assert (lora.adapter_path, lora.rank) == (name, 3)


def test_saved_adapters_have_the_digest_of_their_base_and_peft_does_not_warn(
    peft, parts, model_folder, start, tmp_path, recwarn
):
    base = model_folder("llama-tied")
    start(lora={"rank": 2}).save_checkpoint(tmp_path, None)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "base_weights": weights_digest(base), "quantization": "none"}
    recwarn.clear()
    peft.PeftModel.from_pretrained(plain_model(base), tmp_path)
    assert [str(warning.message) for warning in recwarn] == []


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_adapter_of_another_base_is_refused_and_both_are_named(peft, parts, model_folder, start, tmp_path):
    base, other = Path(model_folder("llama-tied")), tmp_path / "other"
    start(lora={"rank": 2}).save_checkpoint(tmp_path / "w", None)
    shutil.copytree(base, other)
    section = {"model_name": str(other), "hf_cfg": {"lora": {"adapter_path": str(tmp_path / "w")}}}
    HFPolicyWorker(parts.make_context(), HFPolicyConfig(**section)).setup()
    change_weights(other)
    with pytest.raises(UserError) as refused:
        HFPolicyWorker(parts.make_context(), HFPolicyConfig(**section)).setup()
    then, now = weights_digest(str(base)), weights_digest(str(other))
    said = f"was trained on {base} (weights {then}), but policy.model_name is {other}, which has other weights ({now})"
    assert said in str(refused.value)
    assert refused.value.key == "policy.hf_cfg.lora.adapter_path"


def test_a_peft_folder_of_another_base_is_a_warning(peft, parts, model_folder, start, tmp_path, caplog):
    peft_folder(peft, model_folder("llama-tied"), tmp_path)
    start(lora={"adapter_path": str(tmp_path)})
    assert caplog.messages == []
    change_config(tmp_path, base_model_name_or_path="acme/other")
    start(lora={"adapter_path": str(tmp_path)})
    assert caplog.messages == [
        f"The adapter in {tmp_path} names acme/other as its base, and is trained on {model_folder('llama-tied')}."
    ]


def test_an_adapter_folder_as_model_is_an_error_with_the_keys_to_write(peft, tmp_path):
    peft_folder(peft, MODEL, tmp_path / "adapter")
    (tmp_path / "run.yaml").write_text(
        json.dumps({"defaults": str(ROOT / "examples" / "grpo_addition.yaml"), "policy": {"model_name": "adapter"}})
    )
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.yaml")
    folder = tmp_path / "adapter"
    keys = f"set `policy.model_name: {MODEL}` and `policy.hf_cfg.lora.adapter_path: {folder}`"
    assert f"{folder} contains only a LoRA adapter, not a whole model. To continue it, {keys}" in str(refused.value)


TEACHER = {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16}
POLICY = {**TEACHER, "optimizer": ADAM}
SAMPLING = {**POLICY, "generation": {"backend": "hf", "max_new_tokens": 5}}
SUMS = {"dataset_name": "arithmetic", "num_samples": 64, "min_digits": 2}
PAIRS = {"dataset_name": "preference", "path": str(ROOT / "examples" / "addition" / "preferences" / "train.jsonl")}
RUNS = {
    "sft": {"sft": {"global_batch_size": 8}, "policy": POLICY, "data": {"train": {**SUMS, "with_response": True}}},
    "dpo": {"dpo": {"global_batch_size": 8}, "policy": POLICY, "data": {"train": PAIRS}},
    "rm": {"rm": {"global_batch_size": 8}, "policy": POLICY, "data": {"train": PAIRS}},
    "distillation": {
        "distillation": {"num_prompts_per_step": 8},
        "loss_fn": {"topk": 8},
        "teacher": TEACHER,
        "policy": SAMPLING,
        "data": {"train": SUMS},
    },
    "grpo": {
        "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "val_at_start": True},
        "policy": SAMPLING,
        "env": {"arithmetic": {}},
        "data": {"train": SUMS, "validation": {**SUMS, "split": "validation"}},
    },
}


def run_of(folder, algorithm, num_steps, *overrides):
    """The checkpoint of a run in this process, which resumes the run of the folder if there is one."""
    folder.mkdir(exist_ok=True)
    common = {"cluster": {"backend": "in_process"}, "checkpointing": {"save_period": 1}}
    config = {**RUNS[algorithm], **common, "logger": {"log_dir": str(folder / "runs"), "run_name": "run"}}
    (folder / "run.yaml").write_text(json.dumps(config))
    finished = launch(folder / "run.yaml", [f"{algorithm}.max_num_steps={num_steps}", *overrides], console=False)
    return finished.folder / "checkpoints" / f"step_{num_steps:06d}"


@pytest.mark.parametrize(
    "algorithm", ["sft", "dpo", "grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rm", "distillation"))]
)
def test_a_run_that_continues_an_adapter_resumes_and_exports(peft, tmp_path, algorithm):
    first = run_of(tmp_path / "first", "rm" if algorithm == "rm" else "sft", 1, "++policy.hf_cfg.lora.rank=2")
    start = load_file(first / "policy" / "weights" / "adapter_model.safetensors")
    continued = f"++policy.hf_cfg.lora.adapter_path={first / 'policy' / 'weights'}"
    straight = run_of(tmp_path / "straight", algorithm, 2, continued)
    run_of(tmp_path / "resumed", algorithm, 1, continued)
    resumed = run_of(tmp_path / "resumed", algorithm, 2, continued)
    convert(resumed, tmp_path / "out", to="hf", adapter=True)
    saved = load_file(straight / "policy" / "weights" / "adapter_model.safetensors")
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == exported.keys() == start.keys()
    assert [name for name in saved if not torch.equal(saved[name], exported[name])] == []
    assert [name for name in start if torch.equal(start[name], saved[name])] == []
    assert all((tensor - start[name]).abs().max() < 0.05 for name, tensor in saved.items()), "two steps of 0.01 from the start"


def test_the_engine_of_a_run_that_continues_an_adapter_samples_with_it_before_the_first_step(peft, tmp_path):
    first = run_of(tmp_path / "first", "grpo", 2, "++policy.hf_cfg.lora.rank=8", "grpo.val_at_end=true")
    run_of(tmp_path / "second", "grpo", 1, f"++policy.hf_cfg.lora.adapter_path={first / 'policy' / 'weights'}")
    found = {}
    for name in ("first", "second"):
        lines = (tmp_path / name / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
        found[name] = [step["validation/reward"] for step in map(json.loads, lines) if "validation/reward" in step]
    assert found["first"][0] != found["first"][-1] == found["second"][0]
