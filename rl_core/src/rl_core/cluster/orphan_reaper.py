"""A small process that kills the processes its parent left behind; standard library only.

Ray ends its own daemons and workers when a driver dies, but not the processes that a worker started in their own session, and
after `kill -9` the driver cannot do it either. The reaper waits for its parent's death by any cause, kills every process with
the marker in its environment, and then removes their folder, if given. Ray's agents overwrite their environment with their
titles, and stay a minute after the cluster is gone; if the marker's value is a folder, they are recognized by the log files
that they have open in it. It reads /proc and therefore works only on Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

_POLL_S = 0.3
_TRACKER_S = 3.0


def start_reaper(variable: str, value: str, *, folder: str | None = None) -> subprocess.Popen[bytes]:
    """Start a reaper for this process.

    Args:
        variable: Name of an environment variable that the processes to kill were *started* with (a variable set later
            in a running process does not mark its forked children).
        value: Its value, unique to this process's descendants; may be the path of a folder used only by them.
        folder: Removed once those processes are gone.
    """
    # Run as a file, isolated and without site-packages: 10 ms and 9 MB. The environment is clean, so that neither this
    # reaper nor another one kills it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), variable, value, *([folder] if folder is not None else [])],
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def marked_processes(variable: str, *values: str) -> list[int]:
    """Processes started with the variable set to one of the values, or whose logs are in a folder of that path (Ray).

    Excludes this process and zombies.
    """
    wanted = {f"{variable}={value}".encode() for value in values}
    folders = tuple(f"{value}/" for value in values)
    marked = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                if wanted & set(environ.read().split(b"\0")) or _logs_into(entry, folders):  # a zombie has neither
                    marked.append(int(entry))
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return marked


def _logs_into(entry: str, folders: tuple[str, ...]) -> bool:
    with open(f"/proc/{entry}/cmdline", "rb") as cmdline:
        if not cmdline.read().startswith(b"ray::"):
            return False
    descriptors = f"/proc/{entry}/fd"
    return any(os.readlink(f"{descriptors}/{number}").startswith(folders) for number in os.listdir(descriptors))


def sweep(variable: str, *values: str, timeout_s: float = 10.0) -> None:
    """Kill every marked process until two scans in a row find none, or the timeout.

    Python's resource trackers exit by themselves once their processes are gone, and unlink those processes' shared memory
    first: they get a short grace period.
    """
    began = time.monotonic()
    clean = 0
    while time.monotonic() < began + timeout_s:
        pids = marked_processes(variable, *values)
        clean = 0 if pids else clean + 1
        if clean == 2:
            return
        if time.monotonic() < began + _TRACKER_S:
            pids = [pid for pid in pids if not _is_tracker(pid)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended since the scan
                continue
        time.sleep(0.1)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return b"multiprocessing.resource_tracker" in cmdline.read()
    except OSError:  # it has ended meanwhile
        return False


def main(arguments: list[str]) -> None:
    """Wait until the parent is gone, then kill the marked processes."""
    parent, variable, value, *folders = int(arguments[0]), *arguments[1:]
    # Polling, not a pipe: a forked child of the parent would hold the pipe open.
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    sweep(variable, value)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
