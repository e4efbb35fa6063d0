"""`rlcore runs`: run folders with status, steps, best metric and disk use."""

import json

import pytest
from command_line import rlcore


@pytest.fixture
def folder(write_run, tmp_path):
    """A finished run that ranks checkpoints by a loss, a failed one, one with a corrupt status, and another folder."""
    config = {"grpo": {"max_num_steps": 3}, "checkpointing": {"metric_name": "own/loss", "higher_is_better": False}}
    write_run(tmp_path / "a", steps=3, metrics=lambda step: {"own/loss": abs(step - 2) + 0.5}, config=config)
    write_run(tmp_path / "b", steps=2, metrics=lambda step: {"reward/mean": step / 4}, status={"state": "failed", "error": "x"})
    write_run(tmp_path / "c", steps=1)
    (tmp_path / "c" / "status.json").write_text("{")
    (tmp_path / "notes").mkdir()
    return tmp_path


def listed(*arguments):
    result = rlcore("runs", *arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_runs_are_listed_with_status_steps_and_disk_use(folder):
    rows = listed(folder)
    assert [row["folder"].rpartition("/")[2] for row in rows] == ["a", "b", "c"]
    assert [row["status"] for row in rows] == ["finished", "failed", "unreadable"]
    assert [(row["step"], row["planned_steps"]) for row in rows[:2]] == [(3, 3), (2, 2)]
    files = [path for path in (folder / "a").rglob("*") if path.is_file()]
    assert rows[0]["bytes_on_disk"] == sum(path.stat().st_size for path in files) > 0


def test_the_best_value_is_that_of_the_metric_that_ranks_checkpoints_in_its_direction(folder):
    run = listed(folder)[0]
    assert (run["metric"], run["best"], run["best_step"]) == ("own/loss", 0.5, 2)


def test_a_corrupt_run_is_named_and_does_not_hide_the_others(folder):
    result = rlcore("runs", folder)
    assert result.returncode == 0
    assert "status.json is corrupt" in result.stdout
    assert "own/loss 0.5 at step 2" in result.stdout


def test_runs_are_filtered_by_status(folder):
    assert [row["folder"].rpartition("/")[2] for row in listed(folder, "--status", "failed")] == ["b"]
    assert rlcore("runs", folder, "--status", "running").stdout == f"no runs in {folder} with status running\n"


def test_a_folder_that_does_not_exist_ends_with_2(tmp_path):
    result = rlcore("runs", tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert "is not a folder" in result.stderr


def test_without_any_runs_the_command_that_starts_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = "error: There is no folder runs here. `rlcore train CONFIG` writes runs to `logger.log_dir`: give that folder.\n"
    assert (rlcore("runs").returncode, rlcore("runs").stderr) == (2, expected)
