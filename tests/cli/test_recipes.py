"""`rlcore init --gpus`: configs that `plan` fits to GPUs, from the published dimensions of models."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_line import rlcore

from rl_core.errors import UserError
from rlcore_cli.starter.config_values import Hardware, parse_hardware

TOKENIZER = Path(__file__).parents[2] / "examples" / "addition" / "model"
MODELS = {
    # https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json
    "Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


def init(folder, model, gpus, **changed):
    """Run the command for a model with 50 sums as data."""
    shutil.copytree(TOKENIZER, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model" / "config.json").write_text(json.dumps(MODELS[model] | changed))
    rows = [{"question": f"{a}+{a + 7}=", "expected_answer": str(2 * a + 7)} for a in range(10, 60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rlcore("init", folder / "rows.jsonl", "--model", folder / "model", "--gpus", gpus, "--output", folder / "new")


def policy(folder):
    """The policy's section of the config that was written; the config must be valid."""
    config = folder / "new" / "config.yaml"
    assert "computed by `rlcore plan`, not run on such hardware" in config.read_text()
    valid = rlcore("validate", config)
    assert valid.returncode == 0, valid.stderr
    return yaml.safe_load(config.read_text())["policy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "method"),
    [
        pytest.param("Qwen3-4B", "8x80GiB", {}),
        *(
            pytest.param(*case, marks=pytest.mark.full("further models and hardware; Qwen3-4B on 8x80GiB is in CI"))
            for case in (
                ("Qwen3-4B", "24GiB", {"lora": {"rank": 32, "alpha": 32}}),
                ("Qwen3-4B", "80GiB", {}),
                ("Qwen3-4B", "2x8x80GiB", {}),
                ("Llama-3.1-8B", "80GiB", {"lora": {"rank": 32, "alpha": 32}}),
                ("Llama-3.1-8B", "8x80GiB", {"data_parallel": "fsdp2"}),
                ("Llama-3.1-8B", "2x8x80GiB", {"data_parallel": "fsdp2", "fsdp_num_shards": 8}),
                ("Qwen3-30B-A3B", "8x80GiB", {"data_parallel": "fsdp2"}),
                ("Qwen3-30B-A3B", "2x8x80GiB", {"data_parallel": "fsdp2", "fsdp_num_shards": 8}),
            )
        ),
    ],
)
def test_a_config_for_gpus_is_valid_and_its_plan_fits(tmp_path, model, gpus, method):
    done = init(tmp_path, model, gpus)
    assert done.returncode == 0, done.stderr
    section = policy(tmp_path)
    assert section.get("hf_cfg", {}) == method
    assert section["generation"]["vllm_cfg"]["sleep_level"] == 2
    assert section["generation"]["refit_transport"] == "shared_memory"
    planned = rlcore("plan", tmp_path / "new" / "config.yaml", "--gpu", gpus.rpartition("x")[2], "--json")
    assert json.loads(planned.stdout)["fits"] is True, planned.stderr


@pytest.mark.slow
def test_a_deeper_model_gets_another_config(tmp_path):
    (tmp_path / "shallow").mkdir()
    (tmp_path / "deep").mkdir()
    for name, layers in (("shallow", 2), ("deep", 24)):
        done = init(tmp_path / name, "Qwen3-4B", "24GiB", num_hidden_layers=layers)
        assert done.returncode == 0, done.stderr
    assert "hf_cfg" not in policy(tmp_path / "shallow")
    assert "lora" in policy(tmp_path / "deep")["hf_cfg"]


@pytest.mark.full("an error; sizes that are wrong are tested in CI")
@pytest.mark.parametrize(("model", "gpus"), [("Llama-3.1-8B", "24GiB"), ("Qwen3-30B-A3B", "80GiB")])
def test_a_model_that_does_not_fit_is_refused_with_what_is_missing_and_what_would_fit(tmp_path, model, gpus):
    done = init(tmp_path, model, gpus)
    assert done.returncode == 2
    assert "No candidate fits 1 x " in done.stderr
    assert "GiB more than" in done.stderr
    assert "would fit" in done.stderr
    assert not (tmp_path / "new").exists()


def test_hardware_is_nodes_gpus_and_the_size_of_a_gpu():
    assert parse_hardware("2x8x80GiB") == Hardware(nodes=2, gpus=8, size=80 * 2**30)
    assert parse_hardware("8 x 80GB") == Hardware(nodes=1, gpus=8, size=80 * 10**9)
    assert parse_hardware("24GiB") == Hardware(nodes=1, gpus=1, size=24 * 2**30)
    assert parse_hardware("2x8xrtx4090") == Hardware(nodes=2, gpus=8, size=24 * 2**30)
    for wrong in ("8xh1000", "8x", "0x24GiB", "3x2x1x24GiB", "24", "8x80GiBx2"):
        with pytest.raises(UserError, match="--gpus"):
            parse_hardware(wrong)
