"""Cgroup folders of both versions, on copies of the kernel's file trees; the attacks use the real ones."""

from __future__ import annotations

import os
import platform
import signal
import subprocess

import pytest

from rl_sandbox.cgroups import PREFIX, Cgroups, remove
from rl_sandbox.launcher import Launcher, Session

LIMITS = {"memory": 1000, "pids": 10}


@pytest.fixture
def unified(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    return tmp_path


@pytest.fixture
def hierarchies(tmp_path):
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "job").mkdir(parents=True)
    return tmp_path


def files_appear(monkeypatch, *names):
    """The kernel fills a new cgroup with files."""
    make = os.mkdir

    def mkdir(path, *args, **kwargs):
        make(path, *args, **kwargs)
        for name in names:
            (path / name).write_text("")

    monkeypatch.setattr("os.mkdir", mkdir)


def test_version_2_enables_the_controllers_and_limits_memory_without_swap(unified, monkeypatch):
    files_appear(monkeypatch, "memory.max", "memory.swap.max", "pids.max")
    cgroups = Cgroups(unified, "0::/user.slice\n")
    assert (unified / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    [folder] = cgroups.create(f"{PREFIX}1_1", LIMITS)
    written = {file.name: file.read_text() for file in folder.iterdir()}
    assert written == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "10"}


def test_version_1_limits_each_hierarchy_below_the_cgroup_of_the_process(hierarchies, monkeypatch):
    files_appear(monkeypatch, "memory.limit_in_bytes", "pids.max")
    cgroups = Cgroups(hierarchies, "5:cpu,cpuacct:/\n4:memory:/job\n3:pids:/job\n2:devices:/\n")
    folders = cgroups.create(f"{PREFIX}1_1", LIMITS)
    assert {folder.parent for folder in folders} == {hierarchies / "cpu", hierarchies / "memory/job", hierarchies / "pids/job"}
    assert (hierarchies / f"memory/job/{PREFIX}1_1/memory.limit_in_bytes").read_text() == "1000"
    assert (hierarchies / f"pids/job/{PREFIX}1_1/pids.max").read_text() == "10"


def test_without_the_memory_controller_there_is_no_cgroup(hierarchies, unified):
    (unified / "cgroup.controllers").write_text("cpu pids\n")
    assert Cgroups(unified, "0::/\n").parents == {}
    (unified / "cgroup.controllers").unlink()
    assert Cgroups(hierarchies, "3:pids:/job\n").parents == {}


def test_cgroups_of_launchers_that_ended_are_removed(hierarchies):
    cgroups = Cgroups(hierarchies, "4:memory:/job\n3:pids:/job\n")
    abandoned = hierarchies / "memory/job" / f"{PREFIX}999999999_1"
    running = hierarchies / "memory/job" / f"{PREFIX}{os.getpid()}_1"
    for folder in (abandoned, running):
        folder.mkdir()
    cgroups.remove_abandoned()
    assert (abandoned.exists(), running.exists()) == (False, True)


def test_processes_that_are_left_in_a_cgroup_are_killed_but_not_those_of_other_namespaces(tmp_path):
    """The kernel lists them as 0, and a signal to 0 would reach the process group of the launcher."""
    cgroup = tmp_path / f"{PREFIX}1_1"
    cgroup.mkdir()
    process = subprocess.Popen(["sleep", "600"])  # in this process group, like a bubblewrap that has just been forked
    (cgroup / "cgroup.procs").write_text(f"0\n{process.pid}\n0\n")
    assert not remove([cgroup], wait_s=0.0)  # a folder with a file, as while the kernel releases the process
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_a_session_whose_cgroup_is_still_in_use_closes_and_its_cgroup_is_removed_later(tmp_path, monkeypatch):
    """A busy kernel may release the killed processes late. The program that ran did not cause that."""
    monkeypatch.setitem(remove.__kwdefaults__, "wait_s", 0.0)
    launcher = Launcher({"level": "user_namespace", "machine": platform.machine(), "folders": {}, "drop_to": None})
    for number in (1, 2):
        cgroup = tmp_path / f"{PREFIX}{number}"
        cgroup.mkdir()
        (cgroup / "in_use").touch()
        process = subprocess.Popen(["sleep", "100"], start_new_session=True)
        launcher.sessions[number] = Session(process=process, cgroup=[cgroup])
    (tmp_path / f"{PREFIX}2" / "in_use").unlink()
    assert launcher.close(1) == {"ended_by": None}
    assert len(launcher.unremoved) == 1
    (tmp_path / f"{PREFIX}1" / "in_use").unlink()
    launcher.close(2)
    assert (launcher.unremoved, list(tmp_path.iterdir())) == ([], [])
