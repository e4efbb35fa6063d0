"""Commands in README and docs parse and use existing keys, and those of the README run in order."""

import importlib
import json
import re
import shutil
import sys

import pytest
import typer
from documents import NEMO_RL, PAGES, ROOT, SHOWN, commands

from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.reference import schema_index
from rlcore_cli.main import COMMANDS, app, main

OURS = {
    "rl_core",
    "rl_train",
    "rl_backends_base",
    "rl_backends_hf",
    "rl_backends_megatron",
    "rl_backends_vllm",
    "rl_backends_openai",
    "rl_sandbox",
    "rl_envs",
    "rl_serve",
    "rlcore_cli",
}
CATALOGUE = schema_index(Registry(discover()))


def test_the_documents_show_every_command():
    assert set(COMMANDS) <= {words[0] for _, words in SHOWN}
    assert len(SHOWN) > 60


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_a_command_of_the_documents_parses_and_sets_keys_that_exist(page, words):
    context = typer.main.get_command(app).make_context("rlcore", list(words), resilient_parsing=True)
    remaining = list(words)
    while hasattr(context.command, "commands"):
        name = remaining.pop(0)
        command = context.command.get_command(context, name)
        assert command is not None, f"{page}: there is no command {name!r}"
        context = command.make_context(name, list(remaining), parent=context)
    given = context.params
    if given.get("key") == "interface":
        Kind(*given["overrides"])
        return
    keys = [override.partition("=")[0] for override in given.get("overrides") or () if not override.startswith("++")]
    unknown = [key for key in keys if not CATALOGUE.find(tuple(key.split(".")))]
    assert unknown == [], page


def imported_names():
    """Page, module and name of everything from rlcore that a block of Python imports."""
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for module, names in re.findall(r"^from ([\w.]+) import ([\w, ]+)$", block, flags=re.MULTILINE):
                if module.split(".")[0] in OURS:
                    yield from ((page.relative_to(ROOT).as_posix(), module, name.strip()) for name in names.split(","))


def test_every_name_imported_in_the_documents_exists():
    names = set(imported_names())
    assert len(names) > 15
    assert [name for name in names if not hasattr(importlib.import_module(name[1]), name[2])] == []


def test_the_python_of_the_readme_runs_as_printed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names = {}
    try:
        exec(compile(block, "README.md", "exec"), names)
        assert names["policy"].weight_version == 2
    finally:
        for owned in (names["policy"], names["trainer"].generation):
            owned.shutdown()
    answers, reward = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"\['\d+', '\d+'\]", answers)
    assert 0.0 <= float(reward) <= 1.0


def test_the_commands_of_the_readme_run_in_their_order(monkeypatch, tmp_path, capfd):
    text = (ROOT / "README.md").read_text()
    [block] = re.findall(r"## Configuration\n\n```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "readme.yaml").write_text(block)
    small = {
        "defaults": "readme.yaml",
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 11},
        "policy": {
            "model_name": str(ROOT / "examples" / "addition" / "model"),
            "max_total_sequence_length": 16,
            "generation": {"max_new_tokens": 5},
        },
        # The quickstart model only has digits in its vocabulary.
        "data": {"prompt": {"prompt_config": None}},
        "env": {"math": {"num_workers": 1, "require_box": False}},
        "cluster": {"backend": "in_process", "workers_per_node": 1},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(small))
    (tmp_path / "nemo_rl.yaml").write_text(NEMO_RL)
    rows = [{"question": f"{a}+{a + 1}=", "expected_answer": str(2 * a + 1)} for a in range(10, 60)]
    for name, own in {"train.jsonl": rows[8:], "test.jsonl": rows[:8]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in own))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
    monkeypatch.setattr(sys, "path", list(sys.path))

    done = []
    for words in commands(ROOT / "README.md"):
        if words[0] == "watch":
            continue  # it serves until Ctrl-C; tests/cli/test_watch.py runs it
        if words[0] == "compare":
            shutil.copytree("runs/config", "runs/config-2")
        checkpoint = "runs/config/checkpoints/step_000011"
        known = {"CHECKPOINT": checkpoint, "OUTPUT": "converted", "path/to/model": small["policy"]["model_name"]}
        words = [known.get(word, word) for word in words]
        monkeypatch.setattr(sys, "argv", ["rlcore", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code, (words, capfd.readouterr())
        done.append(words[0])
    assert {"validate", "train", "eval", "check", "convert", "report", "compare", "list-backends"} <= set(done)
    assert (tmp_path / "runs" / "config" / "report.html").is_file()
    assert (tmp_path / "converted" / "model.safetensors").is_file()
