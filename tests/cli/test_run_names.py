"""Commands accept the name of a run in `runs`: shells complete it, and an unknown or ambiguous one is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rlcore


@pytest.fixture
def two_runs(write_run, tmp_path, monkeypatch):
    """The working directory has the runs `sums` and `sums-2`, and a folder of notes."""
    for name in ("sums", "sums-2"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_report_and_compare_accept_names_of_runs(two_runs):
    assert rlcore("report", "sums").stdout.startswith("runs/sums/report.html (")
    assert (two_runs / "sums" / "report.html").is_file()
    result = rlcore("compare", "sums", "runs/sums-2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "runs/sums-2" in result.stdout


COMMANDS = [["report"], ["eval"], ["watch"], ["compare", "sums-2"], ["convert", "--to", "hf"], ["chat"], ["serve"]]
ids = [command[0] for command in COMMANDS]


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_an_unknown_name_suggests_the_nearest_run(two_runs, command, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    output = ["model"] if command[0] == "convert" else []
    result = rlcore(*command, "sum", *output)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Did you mean 'sums'?" in result.stderr
    far = rlcore(*command, "entirely_different", *output)
    assert (far.returncode, ". Runs in runs: sums, sums-2." in far.stderr) == (2, True)


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_a_name_that_is_a_model_as_well_is_ambiguous(two_runs, command):
    (two_runs.parent / "sums").mkdir()
    (two_runs.parent / "sums" / "config.json").write_text("{}")
    result = rlcore(*command, "sums", *(["model"] if command[0] == "convert" else []))
    assert (result.returncode, result.stdout) == (2, "")
    folder = two_runs.parent / "sums"
    assert f"sums is ambiguous: it is a path, and runs/sums is a run. Give {folder} or runs/sums." in result.stderr


def test_the_folder_that_init_wrote_for_a_run_is_not_ambiguous(two_runs):
    (two_runs.parent / "sums").mkdir()
    (two_runs.parent / "sums" / "config.yaml").touch()
    assert rlcore("report", "sums").stdout.startswith("runs/sums/report.html (")


def test_a_path_to_the_run_of_its_name_is_not_ambiguous(two_runs, monkeypatch):
    monkeypatch.chdir(two_runs)
    (two_runs / "runs").symlink_to(".")
    assert rlcore("report", "sums").returncode == 0


@pytest.mark.parametrize("command", ids)
def test_a_shell_can_complete_names_of_runs(two_runs, command):
    asked = {"_RLCORE_COMPLETE": "complete_bash", "COMP_WORDS": f"rlcore {command} su", "COMP_CWORD": "2"}
    program = Path(sys.executable).with_name("rlcore")
    result = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, timeout=240)
    assert result.stdout.split() == ["sums", "sums-2"], result.stderr
