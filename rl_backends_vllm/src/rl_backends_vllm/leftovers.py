"""What vLLM and Intel's OpenMP runtime leave in shared memory, and how it goes; knows no engine.

The runtime registers each process by a page and takes it away at a regular end. A worker that is killed, as every worker of a
cluster is in the end, leaves its page, so pages of processes that are gone are swept. vLLM's tensor parallel processes share
memory on a CPU that nobody takes away. Its name serves only to meet, so the name goes once all have met.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

_PAGES = Path("/dev/shm")
_PAGE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")
_GROUP_MEMORY = re.compile(r"(/dev/shm/vllm_dist_\S+-cpushm_\d+)$", flags=re.MULTILINE)


def sweep_registrations(folder: Path = _PAGES) -> list[str]:
    """Remove the pages of processes that are gone and were this user's; the names of those removed."""
    removed = []
    for page in folder.glob("__KMP_REGISTERED_LIB_*"):
        named = _PAGE.fullmatch(page.name)
        if named is None or psutil.pid_exists(int(named[1])):
            continue
        try:
            if page.stat().st_uid == os.getuid():
                page.unlink()
                removed.append(page.name)
        except FileNotFoundError:  # another worker's driver was faster
            continue
    return removed


def unname_group_memory() -> None:
    """Unlink the shared memory of the process groups that this process is in; those that have mapped it keep it."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for path in set(_GROUP_MEMORY.findall(maps.read_text())):
            Path(path).unlink(missing_ok=True)
