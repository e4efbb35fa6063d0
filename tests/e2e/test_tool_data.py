"""Conversations with tools through `rlcore train`: trained, compared and prompted; an error without template support."""

import json
import sys

import pytest
import torch
from e2e_runs import merged
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_train.launch.train import train
from rlcore_cli.main import main

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "{{ '<call>' + call['function'] | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = {"role": "user", "content": "wet?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
TALK = [ASKED, CALLED, RESULT, {"role": "assistant", "content": "yes"}]
ROWS = {
    "sft": {"messages": TALK, "tools": [WEATHER]},
    "dpo": {"prompt": [ASKED], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "no"}], "tools": [WEATHER]},
    "grpo": {"messages": TALK, "tools": json.dumps([WEATHER]), "expected_answer": "yes"},
}
SECTIONS = {
    "sft": {"sft": {"max_num_steps": 2, "global_batch_size": 2}},
    "dpo": {"dpo": {"max_num_steps": 2, "global_batch_size": 2}},
    "grpo": {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {"generation": {"backend": "hf", "max_new_tokens": 4}},
        "env": {"arithmetic": {}},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of bytes, with a template without tool support."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def written(folder, model, name, *, template, rows=None, **keys):
    rows = [ROWS[name]] * 4 if rows is None else rows
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"sft": {"input_key": "messages", "output_key": None}, "dpo": {}, "grpo": {"input_key": "messages"}}[name]
    dataset_name = "preference" if name == "dpo" else "jsonl"
    config = {
        "policy": {
            "backend": "hf",
            "model_name": str(model),
            "max_total_sequence_length": 400,
            "tokenizer": {"chat_template": template},
        },
        "data": {"train": {"dataset_name": dataset_name, "path": str(folder / "rows.jsonl"), **own, **keys}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(merged(config, SECTIONS[name])))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_rows_with_tools_train_by_every_kind_of_algorithm(name, model, tmp_path):
    path = written(tmp_path, model, name, template=WITH_TOOLS)
    finished = train(path, resume="never", console=False)
    steps = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    if name == "sft":
        # Bytes of the assistant: the call and the answer, each with its end of turn; two rows per step.
        call = '<call>{"name": "weather", "arguments": {"city": "Bern"}}'
        assert steps[0]["tokens/trained"] == 2 * (len(call) + 1 + len("yes") + 1)
    if name == "grpo":
        rollouts = [json.loads(line) for file in finished.folder.rglob("rollouts/*.jsonl") for line in file.open()]
        assert "wet?" in rollouts[0]["prompt"]


@pytest.mark.parametrize("name", ROWS)
def test_a_template_without_tool_support_fails_before_workers_start_if_any_row_has_tools(
    name, model, tmp_path, monkeypatch, capsys
):
    without = {key: value for key, value in ROWS[name].items() if key != "tools"}
    plain = {"dpo": {**without, "chosen": TALK[3:]}}.get(name, {**without, "messages": [ASKED, TALK[3]]})
    path = written(tmp_path, model, name, template=PLAIN, rows=[plain] * 6 + [ROWS[name]])
    monkeypatch.setattr(sys, "argv", ["rlcore", "train", str(path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl:7: the chat template leaves out the functions that a row offers" in errors
    assert "policy.tokenizer.chat_template" in errors
