"""A checkpoint folder belongs to one run, and one process writes to it at a time."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from rl_core.errors import CheckpointError, UserError
from rl_train.checkpoints.store import CheckpointStore, RunIdentity, lock_folder, read_identity, refuse_foreign, write_identity

HOLD = """
import sys
from contextlib import ExitStack
from pathlib import Path
from rl_train.checkpoints.store import lock_folder
with ExitStack() as exits:
    lock_folder(Path(sys.argv[1]), exits, setting="checkpointing.checkpoint_dir")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_held_by_another_process_is_refused_with_that_process_and_free_again_after_it_is_killed(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "c")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        for _ in range(2):  # a rejected attempt keeps the name of the owner
            with ExitStack() as exits, pytest.raises(UserError) as refused:
                lock_folder(tmp_path / "c", exits, setting="checkpointing.checkpoint_dir")
            assert f"in use by process {other.pid} on host {socket.gethostname()}" in str(refused.value)
            assert "checkpointing.checkpoint_dir=FOLDER" in str(refused.value)
    finally:
        other.kill()
        other.wait()
    with ExitStack() as exits:
        lock_folder(tmp_path / "c", exits, setting="checkpointing.checkpoint_dir")
        assert (tmp_path / "c" / ".lock").read_text() == f"process {os.getpid()} on host {socket.gethostname()}\n"


def test_a_folder_that_cannot_be_created_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with ExitStack() as exits, pytest.raises(UserError, match=r"Choose another one with logger\.log_dir=FOLDER"):
        lock_folder(tmp_path / "file" / "runs", exits, setting="logger.log_dir")


def test_checkpoints_of_another_run_or_of_an_unknown_run_are_refused(tmp_path):
    mine, theirs = (RunIdentity.new(name="run", folder=tmp_path / name) for name in ("mine", "theirs"))
    store = CheckpointStore(tmp_path / "c")
    refuse_foreign(store, mine, continues=False)
    store.write(10, lambda folder: None, {})
    with pytest.raises(CheckpointError, match=r"belongs to an unknown run \(it has no run.json\) \(steps 10 to 10\)"):
        refuse_foreign(store, mine, continues=False)
    refuse_foreign(store, mine, continues=True)
    write_identity(store.folder, theirs)
    for continues in (False, True):
        with pytest.raises(CheckpointError, match=f"belongs to the run {tmp_path / 'theirs'}.*--resume .*step_000010"):
            refuse_foreign(store, mine, continues=continues)
    write_identity(store.folder, mine)
    refuse_foreign(store, mine, continues=False)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"run_id": "a"}'])
def test_a_damaged_identity_is_reported_with_its_file(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        read_identity(tmp_path)
