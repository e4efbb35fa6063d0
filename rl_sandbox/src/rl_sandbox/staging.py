"""Makes an interpreter below a private folder, such as `/root`, readable for the users of sessions.

Only possible and only needed as root. The folders are mounted in a mount namespace that only the launcher's process and its
children see. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

_STAGE = Path("/tmp")
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def stage(folders: list[str]) -> dict[str, str]:
    """Where other users can read each folder, by its original path.

    Raises:
        OSError: Mounting is not permitted.
    """
    closed = [folder for folder in folders if not readable_by_all(Path(folder))]
    if not closed:
        return {folder: folder for folder in folders}
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _mount(libc, "none", "/", None, _MS_REC | _MS_PRIVATE)
    # Opened before the stage is mounted, which they may be below.
    opened = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]
    _mount(libc, "tmpfs", str(_STAGE), "tmpfs", 0, "size=64k,mode=755")
    staged = {}
    for number, (folder, descriptor) in enumerate(zip(folders, opened, strict=True)):
        target = _STAGE / str(number)
        target.mkdir(mode=0o755)
        _mount(libc, f"/proc/self/fd/{descriptor}", str(target), None, _MS_BIND | _MS_REC)
        os.close(descriptor)
        staged[folder] = str(target)
    return staged


def readable_by_all(folder: Path) -> bool:
    """Whether every user can open the folder and list it."""
    enters = all(parent.stat().st_mode & stat.S_IXOTH for parent in (folder, *folder.parents))
    return enters and bool(folder.stat().st_mode & stat.S_IROTH)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (mounting the interpreter where other users can read it)")
