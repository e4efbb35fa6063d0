"""A full disk gives one message and no incomplete files; a disk that is too small is an error before the first step."""

import errno
import json
import logging

import pytest

from rl_core.errors import CheckpointWriteError, WorkerError
from rl_train.checkpoints.disk_space import check_disk_space, explain_disk_errors, is_full_disk
from rl_train.checkpoints.store import CheckpointStore
from rl_train.errors import DiskFullError
from rl_train.run_folders.status import Status

SIZE = 4 * 2**20


@pytest.fixture
def small_disk(make_small_disk):
    """A file system of 4 MiB."""
    return make_small_disk(SIZE)


def fill(folder):
    (folder / "weights").write_bytes(bytes(SIZE * 3 // 4))


def test_a_checkpoint_on_a_full_disk_names_folder_last_checkpoint_and_fix_and_leaves_nothing(small_disk):
    store = CheckpointStore(small_disk)
    store.write(1, fill, {})
    with pytest.raises(DiskFullError) as refused:
        store.write(2, fill, {})
    text = str(refused.value)
    assert refused.value.exit_code == 1
    assert f"The checkpoint of step 2 could not be written to {small_disk}: the disk is full" in text
    assert f"The last complete checkpoint is {store.path(1)}" in text
    assert "checkpointing.checkpoint_dir" in text
    assert [entry.name for entry in small_disk.iterdir()] == ["step_000001"]


def test_the_status_of_a_run_on_a_full_disk_is_failed(small_disk):
    def run():
        with Status(small_disk, since=0.0), explain_disk_errors(small_disk):
            (small_disk / "metrics.jsonl").write_bytes(bytes(2 * SIZE))

    with pytest.raises(DiskFullError, match=f"The disk of the run folder {small_disk} is full"):
        run()
    assert not (small_disk / ".status.json.tmp").exists()
    status = json.loads((small_disk / "status.json").read_text())
    assert status["state"] == "failed"
    assert "is full" in status["error"]


def test_a_disk_that_holds_not_one_checkpoint_is_refused_and_one_that_holds_too_few_is_a_warning(
    small_disk, caplog, own_messages
):
    folder = small_disk / "not" / "there" / "yet"
    with pytest.raises(DiskFullError, match=r"needs at least 5\.0 MiB, so none can be written") as refused:
        check_disk_space(folder, checkpoint_bytes=5 * 2**20, most_at_once=1)
    assert refused.value.exit_code == 2
    with caplog.at_level(logging.WARNING):
        check_disk_space(folder, checkpoint_bytes=3 * 2**20, most_at_once=2)
        assert "2 more will exist at once" in caplog.text
        caplog.clear()
        check_disk_space(folder, checkpoint_bytes=3 * 2**20, most_at_once=1)
        assert own_messages() == []


def test_a_full_disk_is_recognized_behind_the_errors_of_workers_and_libraries():
    wrapped = WorkerError("rank 0 failed in save_checkpoint()")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_full_disk(wrapped)
    assert is_full_disk(OSError(errno.EDQUOT, "quota"))
    assert is_full_disk(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert not is_full_disk(OSError(errno.EACCES, "denied"))


def test_any_other_failure_of_the_disk_names_the_folder_and_keeps_its_reason(tmp_path):
    def fails(folder):
        (folder / "a").write_text("1")
        raise OSError(errno.EIO, "Input/output error", str(folder / "a"))

    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointWriteError, match=r"Input/output error.*There is no earlier checkpoint"):
        store.write(1, fails, {})
    assert list(tmp_path.iterdir()) == []
