"""`rlcore convert` to Megatron weights and back: lossless, complete, and equal to Transformers."""

import json
import re
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl_backends_megatron import hf_folder
from rl_core.errors import CheckpointError, NotSupportedError, UserError
from rl_train.run_folders.convert import convert

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "addition" / "model"


def tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewritten(source, folder, change):
    """A copy of a model folder with tensors modified by `change`."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    kept = tensors(source)
    change(kept)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def as_type(dtype):
    def change(kept):
        kept.update({name: tensor.to(dtype) for name, tensor in kept.items()})

    return change


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_round_trip_conversion_is_exact(models, tmp_path, kind):
    convert(models / kind, tmp_path / "megatron", to="megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert_same_bits(tensors(tmp_path / "back"), tensors(models / kind))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (models / kind, tmp_path / "back"))
    assert after == before


def test_shards_are_read_and_written(models, tmp_path, monkeypatch):
    cases.plain_model(models / "qwen2").save_pretrained(tmp_path / "source", max_shard_size="40KB")
    monkeypatch.setattr(hf_folder, "_SHARD_BYTES", 20_000)
    convert(tmp_path / "source", tmp_path / "out", to="megatron")
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    assert weight_map.keys() == tensors(models / "qwen2").keys()
    assert_same_bits(tensors(tmp_path / "out"), tensors(models / "qwen2"))
    assert_same_bits(cases.plain_model(tmp_path / "out").state_dict(), cases.plain_model(models / "qwen2").state_dict())


def test_bfloat16_stays_bfloat16(models, tmp_path):
    source = rewritten(models / "qwen3", tmp_path / "source", as_type(torch.bfloat16))
    convert(source, tmp_path / "out", to="megatron")
    assert_same_bits(tensors(tmp_path / "out"), tensors(source))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_mixed_dtypes_become_float32_with_the_same_values(models, tmp_path):
    def mixed(kept):
        for number, (name, tensor) in enumerate(list(kept.items())):
            kept[name] = tensor.to((torch.bfloat16, torch.float32, torch.float16)[number % 3])

    source = rewritten(models / "llama", tmp_path / "source", mixed)
    convert(source, tmp_path / "out", to="megatron")
    assert_same_bits(tensors(tmp_path / "out"), {name: tensor.float() for name, tensor in tensors(source).items()})


def test_a_policy_loads_what_was_converted_and_scores_as_transformers_does(models, tmp_path):
    from rl_backends_megatron import MegatronPolicy

    source = rewritten(models / "llama-tied", tmp_path / "source", lambda kept: kept["model.norm.weight"].mul_(1.5))
    convert(source, tmp_path / "out", to="megatron")
    rows = cases.make_rows()
    policy = MegatronPolicy(str(models / "llama-tied"))
    try:
        before = policy.get_logprobs(rows)["logprobs"]
        policy.load_checkpoint(tmp_path / "out")
        found = policy.get_logprobs(rows)["logprobs"]
    finally:
        policy.shutdown()
    with torch.no_grad():
        expected = cases.plain_logprobs(cases.plain_model(source), rows)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((before - expected).abs().max()) > 0.1


def test_the_command_keeps_the_tokenizer_and_lists_the_files_written(rlcore, tmp_path):
    code, output = rlcore("convert", MODEL, tmp_path / "out", "--to", "megatron")
    assert code == 0, output
    assert "by the policy backend megatron" in output
    assert_same_bits(tensors(tmp_path / "out"), tensors(MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (MODEL / name).read_bytes(), name


def test_a_tied_matrix_stored_twice_is_read_once(models, tmp_path):
    def twice(kept):
        kept["lm_head.weight"] = kept["model.embed_tokens.weight"].clone()

    source = rewritten(models / "llama-tied", tmp_path / "source", twice)
    convert(source, tmp_path / "out", to="megatron")
    assert_same_bits(tensors(tmp_path / "out"), tensors(models / "llama-tied"))


def another_head(kept):
    kept["lm_head.weight"] = kept["model.embed_tokens.weight"] + 1


def one_more(kept):
    kept["model.vision.weight"] = torch.ones(3)


def one_fewer(kept):
    del kept["model.layers.2.mlp.up_proj.weight"]


def integers(kept):
    kept["model.norm.weight"] = kept["model.norm.weight"].to(torch.int8)


def another_shape(kept):
    kept["model.norm.weight"] = torch.ones(31)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (another_head, CheckpointError, r"lm_head\.weight: differs from model\.embed_tokens\.weight"),
        (one_more, NotSupportedError, r"model\.vision\.weight\. They would be lost"),
        (one_fewer, CheckpointError, r"model\.layers\.2\.mlp\.up_proj\.weight: missing"),
        (integers, NotSupportedError, r"model\.norm\.weight as I8, so it is quantized"),
        (another_shape, CheckpointError, r"model\.norm\.weight: has shape \(31,\)"),
    ],
)
def test_a_folder_that_cannot_be_converted_completely_is_rejected(models, tmp_path, change, error, says):
    source = rewritten(models / "llama-tied", tmp_path / "source", change)
    with pytest.raises(error, match=says):
        convert(source, tmp_path / "out", to="megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    # The failed conversion does not block the next one.
    convert(models / "llama-tied", tmp_path / "out", to="megatron")


def test_the_command_ends_with_code_2_for_a_model_without_a_table(rlcore, tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    code, output = rlcore("convert", tmp_path / "gpt2", tmp_path / "out", "--to", "megatron")
    assert code == 2
    assert "has model type 'gpt2', but the Megatron backend supports" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--merge",), "`--merge` applies only to adapters, but .*contains full weights"),
        (("--model", "elsewhere"), "`--model` applies only to adapters, but .*contains full weights"),
    ],
)
def test_the_command_rejects_options_that_do_not_apply_to_full_weights(rlcore, models, tmp_path, options, says):
    code, output = rlcore("convert", models / "llama", tmp_path / "out", "--to", "megatron", *options)
    assert code == 2
    assert re.search(says, " ".join(output.split()))
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_an_error_that_lists_the_formats(models, tmp_path):
    says = r"no format 'megatrn'\. Did you mean 'megatron'\? A Transformers model folder can be converted to: hf, megatron\."
    with pytest.raises(NotSupportedError, match=says):
        convert(models / "llama", tmp_path / "out", to="megatrn")
    with pytest.raises(NotSupportedError, match="no format 'vllm'"):
        convert(models / "llama", tmp_path / "out", to="vllm")


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_an_output_inside_the_source_or_in_an_unwritable_folder_is_rejected(models, tmp_path, to):
    with pytest.raises(UserError, match="would then contain a copy of itself"):
        convert(models / "llama", models / "llama" / "out", to=to)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        convert(models / "llama", tmp_path / "file" / "out", to=to)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "Cannot read .*index.json: JSONDecodeError"),
        ("[]", "has no valid `weight_map`"),
        ('{"weight_map": 3}', "has no valid `weight_map`"),
        ('{"weight_map": {"model.norm.weight": 7}}', "has no valid `weight_map`"),
        ('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}', "lacks 1 of the 2 files"),
    ],
)
def test_an_invalid_index_is_reported_as_an_incomplete_folder(models, tmp_path, index, says):
    source = rewritten(models / "llama", tmp_path / "source", lambda kept: None)
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=says):
        convert(source, tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def plain_scores(folder):
    rows = cases.make_rows(width=14)
    rows["input_ids"] %= transformers.AutoConfig.from_pretrained(MODEL).vocab_size
    with torch.no_grad():
        return cases.plain_logprobs(cases.plain_model(folder), rows)


@pytest.mark.full("test_ray_ranks.py converts a checkpoint of two ranks")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_of_a_run_over_two_ranks_becomes_a_model_of_transformers_and_weights_of_megatron(
    rlcore, tmp_path, local_ray
):
    config = {
        "sft": {"max_num_steps": 2, "global_batch_size": 8},
        "policy": {
            "backend": "megatron",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "optimizer": {"kwargs": {"lr": 1e-2}},
            "megatron_cfg": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 32, "with_response": True}},
        "cluster": {"workers_per_node": 2},
        "logger": {"log_dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    code, output = rlcore("train", tmp_path / "run.yaml")
    assert code == 0, output
    (step,) = (tmp_path / "run").rglob("step_000002")
    code, output = rlcore("convert", step, tmp_path / "model", "--to", "hf")
    assert code == 0, output
    vocabulary = transformers.AutoTokenizer.from_pretrained(MODEL).get_vocab()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == vocabulary
    assert float((plain_scores(tmp_path / "model") - plain_scores(MODEL)).abs().max()) > 0.1
    convert(step, tmp_path / "megatron", to="megatron")
    assert_same_bits(tensors(tmp_path / "megatron"), tensors(tmp_path / "model"))
