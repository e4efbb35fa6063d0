"""Every command of `rlcore` exists, and its help shows an example."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import rlcore

from rlcore_cli.check import CHECKS
from rlcore_cli.main import ALIASES, COMMANDS, SECTIONS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_every_command_shows_an_example_on_a_separate_line(command):
    result = rlcore(command, "--help")
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^  Example:\n      rlcore {command}\b", result.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("table", [COMMANDS, ALIASES, CHECKS])
def test_the_functions_in_the_command_tables_exist(table):
    for target, *_ in table.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_the_help_of_every_check_shows_an_example(check):
    result = rlcore("check", check, "--help")
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^  Example:\n      rlcore check {check}\b", result.stdout, flags=re.MULTILINE)


def test_check_lists_its_checks():
    listed = rlcore("check", "--help").stdout
    for check, (_, summary) in CHECKS.items():
        assert re.search(rf"^  {check} +{re.escape(summary[:30])}", listed, flags=re.MULTILINE)


def test_a_misspelt_check_suggests_the_nearest():
    result = rlcore("check", "modle", "config.yaml")
    assert result.returncode == 2
    assert "No such command 'modle'. Did you mean 'model'?" in result.stderr


@pytest.mark.parametrize(("alias", "check"), [("check-logprobs", "logprobs"), ("diagnose", "model")])
def test_an_alias_runs_the_check_and_is_not_listed(alias, check):
    of_alias, of_check = rlcore(alias, "--help"), rlcore("check", check, "--help")
    assert of_alias.returncode == 0, of_alias.stderr
    assert of_alias.stdout.partition("\n\n")[2] == of_check.stdout.partition("\n\n")[2]
    assert COMMANDS["check"][1][:30] in (listed := rlcore("--help").stdout)
    assert alias not in listed


def test_the_list_of_commands_shows_each_with_its_line():
    listed = rlcore("--help").stdout
    for command, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(summary[:30])}", listed, flags=re.MULTILINE)


def test_every_command_is_in_one_section_of_the_help():
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted({*COMMANDS, "chat", "serve"})
    lines = rlcore("--help").stdout.splitlines()
    below = {title: lines.index(f"{title}:") for title in SECTIONS}
    assert lines.index(next(line for line in lines if line.startswith("  train "))) == below["Train"] + 1
    assert "Commands of plugins:" not in lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rlcore", "list-"], {"list-backends", "list-plugins"}),
        (["rlcore", "ser"], {"serve"}),
        (["rlcore", "check", "l"], {"logprobs"}),
        (["rlcore", "train", "--allow"], {"--allow-config-change"}),
        (["rlcore", "explain", "policy.generation.temp"], {"policy.generation.temperature"}),
    ],
)
def test_a_shell_can_complete_commands_options_and_config_keys(words, expected):
    asked = {"_RLCORE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = Path(sys.executable).with_name("rlcore")
    result = subprocess.run([command], env={**os.environ, **asked}, capture_output=True, text=True)
    assert set(result.stdout.split()) == expected, result.stderr


def test_a_misspelt_command_suggests_the_nearest():
    result = rlcore("list-bakends")
    assert result.returncode == 2
    assert "No such command 'list-bakends'. Did you mean 'list-backends'?" in result.stderr


def test_ctrl_c_that_python_loses_in_a_finalizer_still_ends_a_command(monkeypatch):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def lose(run):
        lost = Interrupted()
        del lost
        time.sleep(60)

    monkeypatch.setattr("rlcore_cli.watch.existing_run_path", lose)
    result = rlcore("watch", "run")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_config_file_instead_of_a_command_suggests_train():
    result = rlcore("config.yaml", "grpo.max_num_steps=3")
    assert result.returncode == 2
    assert "No such command 'config.yaml'. To train with this config: rlcore train config.yaml\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tarin"], "error: No such command 'tarin'. Did you mean 'train'?\nSee `rlcore --help`.\n"),
        (
            ["train", "config.yaml", "--max_steps", "3"],
            "error: No such option: --max_steps\nKeys of the config have no dashes: `rlcore explain max_steps` finds one, and "
            "key=value sets it.\nSee `rlcore train --help`.\n",
        ),
        (
            ["train", "config.yaml", "--lr", "3"],  # similar to --help, but only in its dashes
            "error: No such option: --lr\nKeys of the config have no dashes: `rlcore explain lr` finds one, and key=value sets "
            "it.\nSee `rlcore train --help`.\n",
        ),
        (["train", "a.jsonl"], "error: a.jsonl is a data file: `rlcore init a.jsonl --model MODEL` writes a config for it.\n"),
        (["train", "a.py"], "error: a.py is Python code, but a config is a YAML file (examples/grpo_addition.yaml is one).\n"),
        (["train", "--hlep"], "error: No such option: --hlep (Possible options: --help)\nSee `rlcore train --help`.\n"),
        (["init"], "error: Missing argument 'DATA'.\nSee `rlcore init --help`.\n"),
        (["train", "absent.yaml"], "error: File absent.yaml does not exist.\n"),
    ],
)
def test_mistakes_in_the_command_line_are_printed_like_other_errors(arguments, error):
    result = rlcore(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", error)


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("train", "[CONFIG] [KEY=VALUE]..."),
        ("compare", "RUN..."),
        ("convert", "CHECKPOINT OUTPUT"),
        ("doctor", "[NAME] [KEY=VALUE]..."),
    ],
)
def test_the_usage_line_names_arguments_like_manual_pages(command, usage):
    assert rlcore(command, "--help").stdout.splitlines()[0].endswith(f" {command} [OPTIONS] {usage}")


def test_closed_output_ends_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlcore_cli.main", "list-backends", "--all"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_command_of_a_missing_distribution_names_the_distribution():
    # The process does not see the distribution that has the command.
    code = (
        "import importlib.metadata as m, sys; found = m.distributions; "
        "m.distributions = lambda **k: (d for d in found(**k) if d.name != 'rl-serve'); "
        "sys.argv = ['rlcore', 'serve']; from rlcore_cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        "error: Command 'serve' is not installed: rl-serve is not published; in a checkout of the repository, "
        "pip install ./rl_serve.\n",
    )


def test_the_versions_are_those_of_the_installed_distributions():
    assert rlcore("--version").stdout.splitlines() == ["rlcore 0.1.0", "rl-core 0.1.0"]


def test_the_lists_name_the_components_of_this_repository():
    rows = json.loads(rlcore("list-backends", "--all", "--json").stdout)
    ready = {(row["kind"], row["name"]) for row in rows if row["status"] == "ready"}
    assert {
        ("policy", "hf"),
        ("generation", "hf"),
        ("environment", "math"),
        ("environment", "arithmetic"),
        ("algorithm", "grpo"),
        ("algorithm", "sft"),
        ("loss", "clipped_pg"),
        ("loss", "nll"),
        ("dataset", "jsonl"),
        ("weight_transport", "shared_memory"),
    } <= ready


def test_the_table_has_one_line_for_each_backend():
    lines = rlcore("list-backends").stdout.splitlines()
    assert any(re.match(r"policy +hf +rl-backends-hf 0\.1\.0 +ready +\S", line) for line in lines)
    assert any(re.match(r"generation +openai +rl-backends-openai 0\.1\.0 +ready +\S", line) for line in lines)
    assert any(re.match(r"generation +vllm +rl-backends-vllm 0\.1\.0 +ready +\S", line) for line in lines)
