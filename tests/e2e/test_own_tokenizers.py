"""A tokenizer that Transformers cannot load, named by its import path, in every command: runs, exports, servers and checks."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import rlcore
from starlette.testclient import TestClient
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.data.tokenizer import conversation_tokens, encode, load_tokenizer
from rl_core.errors import DataError
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app

CODE = '''
from pathlib import Path


class Bytes:
    """One token for each byte, and three control tokens."""

    vocab_size = 259
    special_tokens = {"<end>": 256, "<pad>": 257, "<turn>": 258}
    bos_token_id, eos_token_id, pad_token_id = None, 256, 257
    chat_template = (
        "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )

    def __init__(self, model_name):
        self.marks = (Path(model_name) / "marks.txt").read_text()

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")

    def save(self, folder):
        (folder / "marks.txt").write_text(self.marks)
'''
NAME = "plain_bytes:Bytes"
ANSWERS = {"response_key": "answer", "output_key": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The module of the tokenizer, a model for it without tokenizer files, and rows."""
    folder = tmp_path_factory.mktemp("own_tokenizer")
    (folder / "plain_bytes.py").write_text(CODE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=256, eos_token_id=256, **sizes))
    model.save_pretrained(folder / "model")
    (folder / "model" / "marks.txt").write_text("marks of bytes")
    rows = [{"question": f"{number}+1?", "expected_answer": str(number + 1), "answer": "é"} for number in range(8)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def write_config(folder, name, keys=(), **sections):
    policy = {
        "backend": "hf",
        "model_name": str(folder / "model"),
        "tokenizer": {"name": NAME},
        "max_total_sequence_length": 96,
    }
    values = {
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 2},
        "data": {"train": {"dataset_name": "jsonl", "path": str(folder / "sums.jsonl"), **dict(keys)}},
        "logger": {"run_name": name, "log_dir": str(folder / "runs")},
    }
    (folder / f"{name}.yaml").write_text(
        yaml.safe_dump({**values, **sections, "policy": {**policy, **sections.get("policy", {})}})
    )
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def trained(folder):
    """Config and run folder of GRPO after two steps."""
    algorithm = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2, "val_period": 0}
    engine = {"backend": "hf", "max_new_tokens": 6, "stop_strings": ["zzz"]}
    path = write_config(folder, "grpo", grpo=algorithm, policy={"generation": engine}, env={"math": {}})
    done = rlcore("train", path)
    assert done.returncode == 0, done.stderr
    return path, folder / "runs" / "grpo"


def test_sft_trains_and_saves_the_files_of_the_tokenizer(folder):
    path = write_config(folder, "sft", ANSWERS, sft={"max_num_steps": 2, "global_batch_size": 4, "val_period": 0})
    assert rlcore("validate", "--deep", path).returncode == 0
    done = rlcore("train", path)
    assert done.returncode == 0, done.stderr
    weights = folder / "runs" / "sft" / "checkpoints" / "step_000002" / "policy" / "weights"
    assert (weights / "marks.txt").read_text() == "marks of bytes"
    assert [path.name for path in weights.glob("tokenizer*")] == ["tokenizer_code.txt"]
    assert load_tokenizer(NAME, model_name=weights).tokenizer.marks == "marks of bytes"


def test_grpo_trains_on_its_token_ids_and_continues_from_a_checkpoint(trained):
    path, run = trained
    [row, *_] = map(json.loads, (run / "rollouts" / "step_000001.jsonl").read_text().splitlines())
    assert bytes(row["tokens"]).decode(errors="replace") == row["completion"]
    assert row["prompt_tokens"] == [258, *f"user: {row['prompt']}".encode(), 256, 258, *b"assistant: "]
    done = rlcore("train", path, "grpo.max_num_steps=3")
    assert done.returncode == 0, done.stderr
    assert (run / "checkpoints" / "step_000003" / "policy" / "weights" / "marks.txt").is_file()


def test_the_server_completes_and_chats_with_the_tokenizer_of_the_run(trained):
    _, run = trained
    with started_model(str(run), backend=None) as model:
        engine = EngineThread(model.generation)
        with TestClient(create_app(model, engine, limits=Limits())) as client:
            asked = {"model": model.name, "max_tokens": 5, "temperature": 1.0, "logprobs": 1}
            completion = client.post("/v1/completions", json={**asked, "prompt": "1+1?"})
            assert completion.status_code == 200, completion.text
            messages = [{"role": "user", "content": "1+1?"}]
            chat = client.post("/v1/chat/completions", json={**asked, "logprobs": True, "messages": messages})
            assert chat.status_code == 200, chat.text
            assert chat.json()["usage"]["prompt_tokens"] == len("user: 1+1?assistant: ") + 3
        engine.close()


@pytest.fixture(scope="module")
def exported(folder, trained):
    """The model folder of the run, and what `rlcore convert` printed about it."""
    done = rlcore("convert", trained[1], folder / "exported")
    assert done.returncode == 0, done.stderr
    return folder / "exported", done.stdout


def test_convert_carries_the_files_of_the_tokenizer_and_says_how_to_use_it(folder, exported):
    path, said = exported
    assert (path / "marks.txt").read_text() == "marks of bytes"
    assert "Left out" not in said
    assert f"The tokenizer is the code {NAME}, which Transformers cannot load" in said
    assert f"rlcore serve {path} --backend hf policy.tokenizer.name={NAME}" in said
    assert rlcore("convert", path, folder / "again").returncode == 0
    for name in ("marks.txt", "chat_template.jinja", "tokenizer_code.txt"):
        assert (folder / "again" / name).read_bytes() == (path / name).read_bytes()


def completion_of(target, **options):
    """The completion that the server of a model or run decodes greedily, and the number of tokens of its prompt."""
    with started_model(str(target), **options) as model:
        engine = EngineThread(model.generation)
        with TestClient(create_app(model, engine, limits=Limits())) as client:
            messages = [{"role": "user", "content": "1+1? <end>"}]
            asked = {"model": model.name, "max_tokens": 5, "temperature": 0.0, "messages": messages}
            chat = client.post("/v1/chat/completions", json=asked)
            assert chat.status_code == 200, chat.text
        engine.close()
    return chat.json()["choices"][0]["message"]["content"], chat.json()["usage"]["prompt_tokens"]


def test_an_exported_model_is_served_with_its_tokenizer_as_its_run(trained, exported):
    path, _ = exported
    served = completion_of(path, backend="hf", overrides=[f"policy.tokenizer.name={NAME}"])
    assert served == completion_of(trained[1], backend=None)
    assert served[1] == len("user: 1+1? <end>assistant: ") + 3


def test_an_exported_model_answers_in_the_terminal(exported, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1?\n"))
    options = ["--backend", "hf", "--greedy", "--max-tokens", "4"]
    done = rlcore("chat", exported[0], f"policy.tokenizer.name={NAME}", *options)
    assert done.returncode == 0, done.stderr


COMMANDS_OF_MODELS = (
    ("serve", "--backend", "hf", "--port", "0"),
    ("chat", "--backend", "hf"),
    ("prompt", "show", "generic/math", "--model"),
)


@pytest.mark.parametrize("command", COMMANDS_OF_MODELS, ids=lambda command: command[0])
def test_a_command_that_names_no_tokenizer_for_an_exported_model_says_which_it_needs(exported, command):
    done = rlcore(*command, exported[0])
    assert done.returncode == 2
    assert f"policy.tokenizer.name='{NAME}' or --tokenizer" in done.stderr


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("data", "show"), "<turn>user: 0+1?<end><turn>assistant: "),
        (("plan",), ""),
        (("validate", "--deep"), ""),
        pytest.param(("check", "model"), "chat_template_renders", marks=pytest.mark.slow),
        pytest.param(("check", "logprobs"), "exp(mean |d|)", marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_commands_that_read_a_config_use_its_tokenizer(trained, command, shown):
    done = rlcore(*command, trained[0])
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_an_evaluation_of_an_exported_model_uses_the_tokenizer_of_the_config(folder, trained, exported):
    rows = json.dumps({"dataset_name": "jsonl", "path": str(folder / "sums.jsonl")})
    done = rlcore("eval", trained[0], f"++data.validation={rows}", "--checkpoint", exported[0])
    assert done.returncode == 0, done.stderr


def test_init_writes_a_config_for_the_tokenizer_of_a_model(folder, exported):
    output = folder / "started"
    done = rlcore("init", folder / "sums.jsonl", "--model", exported[0], "--tokenizer", NAME, "--output", output)
    assert done.returncode == 0, done.stderr
    policy = yaml.safe_load((output / "config.yaml").read_text())["policy"]
    assert policy["tokenizer"] == {"name": NAME}
    assert rlcore("validate", "--deep", output / "config.yaml").returncode == 0
    refused = rlcore("init", folder / "sums.jsonl", "--model", exported[0], "--output", folder / "other")
    assert refused.returncode == 2
    assert f"policy.tokenizer.name='{NAME}' or --tokenizer" in refused.stderr


def test_a_prompt_is_shown_in_the_tokens_of_the_tokenizer(exported):
    row = ["--input", '{"problem": "1+1?"}']
    done = rlcore("prompt", "show", "generic/math", *row, "--model", exported[0], "--tokenizer", NAME)
    assert done.returncode == 0, done.stderr
    assert "258:'<turn>' 117:'u'" in done.stdout


def test_another_code_of_the_tokenizer_needs_confirmation_when_a_run_is_resumed(trained, folder, monkeypatch):
    path, _ = trained
    (folder / "plain_bytes.py").write_text(CODE.replace('"replace"', '"ignore"'))
    try:
        done = rlcore("train", path, "grpo.max_num_steps=4")
    finally:
        (folder / "plain_bytes.py").write_text(CODE)
    assert done.returncode == 2
    assert "Bytes in plain_bytes.py changed" in done.stderr


def test_text_and_ids_of_control_tokens(folder):
    tokenizer = load_tokenizer(NAME, model_name=folder / "model")
    assert encode("é<end>", tokenizer) == [0xC3, 0xA9, 256]
    assert tokenizer.decode([0xC3, 0xA9, 256, 0xC3]) == "é<end>\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([0xC3, 0xA9, 256], skip_special_tokens=True) == "é"
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token_id, tokenizer.bos_token_id) == (259, "<end>", 257, None)
    assert tokenizer.convert_ids_to_tokens(ord("a")) == "a"
    assert len(tokenizer.get_vocab()) == 259


def test_the_tokenizer_in_the_documentation_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "class Bytes" in block]
    (tmp_path / "documented_bytes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = load_tokenizer("documented_bytes:Bytes")
    assert encode("é<end>", tokenizer) == [0xC3, 0xA9, 256]
    assert conversation_tokens([{"role": "assistant", "content": "a"}], tokenizer) == [97, 256]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("    def decode", "    def decoded", "has no `decode`"),
        ("eos_token_id, pad_token_id = None, 256", "eos_token_id, pad_token_id = None, 300", "`eos_token_id` is 300"),
        ("list(text.encode())", "[text]", "`encode` returned"),
        ("list(text.encode())", "[259 for _ in text]", "`encode` returned"),
        ("def __init__(self, model_name)", "def __init__(self)", "plain_bytes:Bytes"),
    ],
)
def test_a_tokenizer_without_what_runs_need_is_refused(folder, tmp_path, monkeypatch, old, new, problem):
    assert CODE.count(old) == 1
    (tmp_path / "wrong_bytes.py").write_text(CODE.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_bytes", raising=False)
    with pytest.raises(DataError, match=problem.replace("plain_bytes", "wrong_bytes")):
        load_tokenizer("wrong_bytes:Bytes", model_name=folder / "model")


def test_a_path_without_a_tokenizer_is_reported_at_its_key(folder):
    path = write_config(folder, "typo", ANSWERS, sft={"max_num_steps": 1})
    done = rlcore("validate", "--deep", path, "policy.tokenizer.name=plain_bytes:Byte")
    assert done.returncode == 2
    assert "policy.tokenizer.name" in done.stderr
    assert "Bytes" in done.stderr
