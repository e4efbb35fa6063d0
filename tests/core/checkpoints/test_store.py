"""Checkpoints are whole or absent, whatever happens while they are written."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rl_core.checkpoints.store import CheckpointStore, Retention, read_manifest
from rl_core.errors import CheckpointError


def fill(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "data").write_bytes(b"x" * 1000)


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=2, keep_top_k=1, metric_name="m"))
    for step, value in enumerate([0.1, 0.9, 0.3, 0.2, 0.5], start=1):
        store.write(step, fill, {"m": value})
    assert store.steps() == [2, 4, 5]


def test_ties_favour_the_newer_and_a_missing_metric_is_never_best(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1, keep_top_k=1, metric_name="m"))
    for step, metrics in enumerate([{"m": 0.5}, {"m": 0.5}, {}, {"m": float("nan")}], start=1):
        store.write(step, fill, metrics)
    assert store.steps() == [2, 4]


def test_lower_can_be_better(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1, keep_top_k=1, metric_name="m", higher_is_better=False))
    for step, value in enumerate([0.4, 0.1, 0.3], start=1):
        store.write(step, fill, {"m": value})
    assert store.steps() == [2, 3]


def test_a_write_that_raises_leaves_the_older_checkpoint_and_nothing_under_a_final_name(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    store.write(1, fill, {})

    def breaks(folder):
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write(2, breaks, {})
    assert store.steps() == [1]
    store.sweep()
    assert [entry.name for entry in (tmp_path / "c").iterdir()] == ["step_000001"]


def test_a_kill_in_the_middle_of_a_write_leaves_no_torn_checkpoint(tmp_path):
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from rl_core.checkpoints.store import CheckpointStore
        store = CheckpointStore(Path(sys.argv[1]))
        store.write(1, lambda folder: (folder / "a").write_text("1"), {})
        def slow(folder):
            (folder / "a").write_text("2")
            print("writing", flush=True)
            time.sleep(60)
        store.write(2, slow, {})
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "c")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    store = CheckpointStore(tmp_path / "c")
    assert store.steps() == [1]
    assert read_manifest(store.latest())["step"] == 1


def test_rewriting_a_step_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    store.write(3, lambda folder: (folder / "a").write_text("old"), {})
    time.sleep(0.01)
    store.write(3, lambda folder: (folder / "a").write_text("new"), {"m": 1.0})
    assert (store.latest() / "a").read_text() == "new"
    assert json.loads((store.latest() / "manifest.json").read_text())["metrics"] == {"m": 1.0}


def test_a_folder_that_is_no_checkpoint_says_what_it_holds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no manifest.json \(it holds config.json\)"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_manifest(tmp_path / "absent")
