"""The order in which a file is written, so that it is complete or absent after a crash of the machine."""

import os

from rl_train.files import write_atomically


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    steps, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: steps.append("rename") or replace(*paths))
    write_atomically(tmp_path / "status.json", b"{}")
    assert steps == [str(tmp_path / ".status.json.tmp"), "rename", str(tmp_path)]
    assert (tmp_path / "status.json").read_bytes() == b"{}"
