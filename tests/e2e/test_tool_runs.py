"""A run with the environment `tools` through `rlcore train`: prompts show the tools, and metrics count the calls."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_train.launch.train import train
from rlcore_cli.main import main

TEMPLATE = Path(__file__).parents[2] / "examples" / "tools" / "model" / "chat_template.jinja"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def config_of(folder, model, template):
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {
            "backend": "hf",
            "model_name": str(model),
            "max_total_sequence_length": 1600,
            "tokenizer": {"chat_template": template},
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"train": {"dataset_name": "arithmetic", "task_name": "tools", "style": "chat", "num_samples": 8}},
        "env": {"tools": {"tools": ["calculator"], "max_tool_turns": 1}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def test_a_run_with_tools_shows_them_in_the_prompt_and_reports_calls(model, tmp_path):
    finished = train(config_of(tmp_path, model, str(TEMPLATE)), resume="never", console=False)
    [step] = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert step["env/tools/tool_calls"] == 0.0
    assert step["env/tools/accuracy"] == 0.0
    assert step["env/tools/invalid_call_frac"] == 0.0


def test_a_template_without_tools_is_refused_before_workers_start(model, tmp_path, monkeypatch, capsys):
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(sys, "argv", ["rlcore", "train", str(config_of(tmp_path, model, plain))])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "env.tools.tool_parser" in errors
    assert "the chat template leaves out tool calls" in errors
