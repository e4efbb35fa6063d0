"""Intel's OpenMP runtime of a worker: which library is preloaded, and what it leaves behind; knows no engine.

The runtime registers each process by a page in shared memory and takes it away at a regular end. A worker that is killed, as
every worker of a cluster is in the end, leaves its page, so pages of processes that are gone are swept.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil

_PAGES = Path("/dev/shm")
_PAGE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")


def preloads(python: str | None) -> str:
    """The runtime of the worker's environment, before whatever is preloaded already; empty without either.

    Args:
        python: the worker's interpreter, where it is not this one.
    """
    prefix = Path(python).parent.parent if python is not None else Path(sys.prefix)
    library = prefix / "lib" / "libiomp5.so"
    parts = [str(library)] if library.exists() else []
    return ":".join([*parts, *filter(None, [os.environ.get("LD_PRELOAD")])])


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
