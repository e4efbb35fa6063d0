"""Checkpoints are complete or absent, whatever happens while they are written."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rl_core.errors import CheckpointError
from rl_train.checkpoints.manifest import read_manifest
from rl_train.checkpoints.store import CheckpointStore, Retention


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


def test_a_metric_that_no_checkpoint_has_is_a_warning(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=2, keep_top_k=1, metric_name="validation/acuracy"))
    store.write(1, fill, {"loss": 1.0})
    assert not caplog.records  # a later one may have it
    for step in (2, 3):
        store.write(step, fill, {"validation/accuracy": 0.5})
    [record] = caplog.records
    assert "steps 1, 2 has the metric validation/acuracy" in record.getMessage()
    assert store.steps() == [1, 2, 3]


def test_all_checkpoints_are_kept_until_the_metric_that_ranks_them_appears(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1, keep_top_k=1, metric_name="m"))
    for step in range(1, 5):
        store.write(step, fill, {})
    assert store.steps() == [1, 2, 3, 4]
    store.write(5, fill, {"m": 1.0})
    store.write(6, fill, {})
    assert store.steps() == [5, 6]


def test_checkpoints_of_interrupted_runs_need_no_metric(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=2, keep_top_k=1, metric_name="m", save_period=10))
    for step in (2, 3, 10):
        store.write(step, fill, {})
    assert not caplog.records
    store.write(20, fill, {})
    [record] = caplog.records
    assert "steps 10, 20 has the metric m" in record.getMessage()


def test_a_metric_that_some_checkpoints_lack_is_not_reported(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1, keep_top_k=1, metric_name="m"))
    for step, metrics in enumerate([{}, {"m": 1.0}, {}, {}], start=1):
        store.write(step, fill, metrics)
    assert not caplog.records


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


def test_a_kill_during_a_write_leaves_no_incomplete_checkpoint(tmp_path):
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from rl_train.checkpoints.store import CheckpointStore
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
    store.write(3, lambda folder: (folder / "a").write_text("new"), {"m": 1.0})
    assert (store.latest() / "a").read_text() == "new"
    assert json.loads((store.latest() / "manifest.json").read_text())["metrics"] == {"m": 1.0}


def test_pruning_a_checkpoint_that_is_a_link_deletes_the_link_only(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1))
    store.write(1, fill, {}).rename(tmp_path / "elsewhere")
    store.path(1).symlink_to(tmp_path / "elsewhere")
    store.write(2, fill, {})
    assert [entry.name for entry in (tmp_path / "c").iterdir()] == ["step_000002"]
    assert read_manifest(tmp_path / "elsewhere")["step"] == 1


KILLED = textwrap.dedent(
    """
    import os, shutil, sys
    from pathlib import Path
    from rl_train.checkpoints.store import CheckpointStore, Retention

    CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}

    def fill(text):
        def write(folder):
            (folder / "deep").mkdir()
            for name in ("a", "deep/b"):
                (folder / name).write_text(text)
        return write

    def content(folder):
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}

    def in_child(work, kill_at):
        # Run `work` and exit just before its n-th change of the file system, or with 0 at its end.
        child = os.fork()
        if child == 0:
            counted = 0
            def count(event, arguments):
                nonlocal counted
                writes = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
                if event in CHANGES or writes:
                    counted += 1
                    if counted == kill_at:
                        os._exit(9)
            sys.addaudithook(count)
            work()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def store(folder):
        return CheckpointStore(folder, Retention(keep_latest_k=2))

    root, rewritten = Path(sys.argv[1]), int(sys.argv[2])
    good, reference = root / "good", root / "reference"
    for step in (1, 2):
        store(good).write(step, fill("old"), {})
    old = {step: content(store(good).find(step)) for step in (1, 2)}
    shutil.copytree(good, reference)
    store(reference).write(rewritten, fill("new"), {})
    new = content(store(reference).find(rewritten))
    kill_at, ended = 0, 9
    while ended != 0:
        kill_at += 1
        folder = root / f"c{kill_at}"
        shutil.copytree(good, folder)
        ended = in_child(lambda: store(folder).write(rewritten, fill("new"), {}), kill_at)
        for swept in (False, True):
            found = store(folder)
            if swept:
                # The cleanup can be killed too; the next one completes it.
                in_child(found.sweep, 1 + kill_at % 4)
                found.sweep()
                assert all(entry.name[5:].isdigit() for entry in folder.iterdir()), list(folder.iterdir())
            steps = found.steps()
            assert steps in ([1, 2], [1, 2, 3], [2, 3]), (kill_at, swept, steps)
            for step in steps:
                allowed = [old[step]] if step in old else []
                allowed += [new] if step == rewritten else []
                assert content(found.find(step)) in allowed, (kill_at, swept, step)
    assert content(store(folder).find(rewritten)) == new
    print(kill_at - 1, "kills")
    """
)


@pytest.mark.parametrize("rewritten", [2, 1, 3])
def test_a_kill_at_any_file_operation_of_a_write_leaves_only_complete_checkpoints_and_loses_none(tmp_path, rewritten):
    script = [sys.executable, "-c", KILLED, str(tmp_path), str(rewritten)]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    # It makes two folders and three files, renames, and deletes as many.
    assert int(ended.stdout.split()[0]) >= 10, ended.stdout


def test_the_checkpoint_just_written_is_kept_even_if_later_steps_exist(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=1, keep_top_k=1, metric_name="m"))
    store.write(9, fill, {"m": 0.9})
    assert store.write(3, fill, {"m": 0.1}).is_dir()
    assert store.steps() == [3, 9]


def test_checkpoints_later_than_the_one_resumed_from_are_set_aside_and_never_pruned(tmp_path):
    store = CheckpointStore(tmp_path / "c", Retention(keep_latest_k=3))
    for step in (2, 4, 6):
        store.write(step, lambda folder, step=step: (folder / "a").write_text(f"first {step}"), {})
    assert store.set_aside(after=6) is None
    assert store.set_aside(after=2) == tmp_path / "c" / "abandoned_1"
    assert store.steps() == [2]
    store.write(4, lambda folder: (folder / "a").write_text("second 4"), {})
    assert store.set_aside(after=2) == tmp_path / "c" / "abandoned_2"
    for step in (3, 4, 5, 6):
        store.write(step, fill, {})
    store.sweep()
    aside = sorted((tmp_path / "c").glob("abandoned_*/step_*/a"))
    assert [path.read_text() for path in aside] == ["first 4", "first 6", "second 4"]
    assert [read_manifest(path.parent)["step"] for path in aside] == [4, 6, 4]


def test_a_folder_that_is_not_a_checkpoint_is_an_error_that_lists_its_contents(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no manifest.json \(it contains: config.json\)"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_manifest(tmp_path / "absent")
