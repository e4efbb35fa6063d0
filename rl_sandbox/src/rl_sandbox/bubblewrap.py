"""The command line that starts a session in bubblewrap. Standard library only; used in the launcher's process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = "/home/sandbox"
"""Working folder of the programs inside the sandbox."""
ENVIRONMENT = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "LOGNAME": "sandbox",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "TMPDIR": f"{HOME}/tmp",
    "USER": "sandbox",
}
"""All environment variables of the programs."""
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def command(
    executable: str, command_of_session: Sequence[str], *, folders: Mapping[str, str], disk_bytes: int, seccomp: int
) -> list[str]:
    """The command line that runs a session inside bubblewrap.

    Args:
        executable: Path of `bwrap`.
        command_of_session: What runs inside.
        folders: Folders that are visible inside, read-only: path inside to path outside. `/usr` always is.
        disk_bytes: Size of the writable file system, and of `/dev/shm`.
        seccomp: File descriptor with the filter of `rl_sandbox.seccomp`.
    """
    # Order matters: later mounts cover earlier ones. Without the last remounts a program could fill `/` and `/dev`, whose sizes
    # are half of the machine's memory.
    return [
        *(executable, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *(item for name, value in ENVIRONMENT.items() for item in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *_system_folders(),
        *(item for inside, outside in sorted(folders.items()) for item in ("--ro-bind", outside, inside)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(disk_bytes), "--tmpfs", "/dev/shm"),
        *("--size", str(disk_bytes), "--tmpfs", HOME, "--dir", f"{HOME}/tmp"),
        *(() if any(Path(folder).is_relative_to("/tmp") for folder in folders) else ("--symlink", f"{HOME[1:]}/tmp", "/tmp")),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME),
        *("--seccomp", str(seccomp), "--", *command_of_session),
    ]


def _system_folders() -> list[str]:
    """`/lib` and other folders of the system: links into `/usr` on most systems, folders on some."""
    arguments = []
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            arguments += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    return arguments
