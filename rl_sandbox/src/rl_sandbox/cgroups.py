"""One cgroup per session, which limits its processes together. Standard library only; used in the launcher's process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "rl_sandbox_"
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_RULES = {
    # version 1, version 2
    "memory": (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ("memory.max",)),
    "pids": (("pids.max",), ("pids.max",)),
    "cpu": ((), ()),
}
_REMOVAL_S = 5.0
"""Seconds to wait until the kernel has released the killed processes of a cgroup."""


class Cgroups:
    """Creates cgroups: with version 1 below the cgroup of this process, with version 2 below the root of the hierarchy.

    Args:
        root: Where the cgroup file systems are mounted.
        membership: Content of `/proc/self/cgroup`.

    Attributes:
        parents: Folder to create cgroups in, by controller; empty if none is writable. Version 2 has one folder for all.
        version: 1 or 2.
    """

    def __init__(self, root: Path = _ROOT, membership: str | None = None) -> None:
        text = Path("/proc/self/cgroup").read_text() if membership is None else membership
        self.version = 2 if (root / "cgroup.controllers").exists() else 1
        self.parents: dict[str, Path] = {}
        if self.version == 2:
            self._find_unified(root)
        else:
            self._find_hierarchies(root, text)
        if not {"memory", "pids"} <= set(self.parents):
            self.parents = {}

    def _find_unified(self, root: Path) -> None:
        """The root of the hierarchy: processes in inner cgroups forbid children with controllers, and most have some."""
        with contextlib.suppress(OSError):
            available = (root / "cgroup.controllers").read_text().split()
            wanted = [name for name in _CONTROLLERS if name in available]
            (root / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
            if os.access(root, os.W_OK):
                self.parents = dict.fromkeys(wanted, root)

    def _find_hierarchies(self, root: Path, membership: str) -> None:
        for line in membership.splitlines():
            _, names, path = line.split(":", 2)
            for name in set(names.split(",")) & set(_CONTROLLERS):
                folder = root / name / path.lstrip("/")
                if folder.is_dir() and os.access(folder, os.W_OK):
                    self.parents[name] = folder

    def create(self, name: str, limits: Mapping[str, int]) -> list[Path]:
        """Create a cgroup; returns its folders.

        Args:
            name: Its name, which begins with `PREFIX`.
            limits: `memory` in bytes and `pids`.
        """
        created: list[Path] = []
        for controller, parent in self.parents.items():
            folder = parent / name
            folder.mkdir(exist_ok=True)
            if folder not in created:
                created.append(folder)
            for file in _RULES[controller][self.version - 1]:
                if (folder / file).exists():
                    (folder / file).write_text(str(limits[controller]))
        if self.version == 2 and created and (created[0] / "memory.swap.max").exists():
            (created[0] / "memory.swap.max").write_text("0")
        return created

    def remove_abandoned(self) -> None:
        """End the sessions of launchers that were killed, and remove their cgroups.

        Their processes have ended already, except for a bubblewrap that was just starting.
        """
        for parent in set(self.parents.values()):
            for folder in parent.glob(f"{PREFIX}*"):
                owner = folder.name.removeprefix(PREFIX).partition("_")[0]
                if owner.isdigit() and not _runs(int(owner)):
                    with contextlib.suppress(OSError):
                        remove([folder])


def _kill_processes(cgroup: Path) -> None:
    # Processes of other process namespaces are listed as 0, which `kill` takes for the process group of this process.
    with contextlib.suppress(OSError):  # the cgroup or a process may end meanwhile
        for process in (cgroup / "cgroup.procs").read_text().split():
            if process != "0":
                os.kill(int(process), signal.SIGKILL)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def enter(folders: list[Path]) -> None:
    """Move this process into a cgroup."""
    for folder in folders:
        (folder / "cgroup.procs").write_text("0")


def remove(folders: list[Path], *, wait_s: float = _REMOVAL_S) -> bool:
    """Kill what is left in a cgroup and remove it; returns whether it is gone.

    The kernel may need a moment to release processes, and a bubblewrap that is killed while it starts can leave a child that
    does not end with it.
    """
    end = time.monotonic() + wait_s
    for folder in folders:
        while folder.exists():
            try:
                folder.rmdir()
            except OSError:
                _kill_processes(folder)
                if time.monotonic() >= end:
                    return False
                time.sleep(0.002)
    return True
