"""The process that starts and ends sessions. Standard library only, because it must start fast and stay small.

It exists for three reasons. bubblewrap's `--die-with-parent` watches the thread that started it, so no short-lived thread may
start a session. Starting processes from a small process is faster and safer than from one with PyTorch and threads. And
it outlives a crash of the process that uses the sandbox, so it can kill the sessions and remove their cgroups and folders.

It exits when its socket is closed or the process that started it has ended. Requests and replies are JSON, one per packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_sandbox import cgroups, seccomp

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
PACKET = 1 << 17
"""Maximum size of a request or reply in bytes."""
FIRST_UID, LAST_UID = 60706, 61183
"""User ids for sessions, which systemd's list of reserved ranges leaves unused."""
_PDEATHSIG, _SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl
_MIB = 1 << 20
_OVERHEAD = 64 * _MIB
"""Memory of the processes that control a session, in its cgroup."""
_CONTROL_PROCESSES = 4


@dataclass(kw_only=True)
class Session:
    """A running session and what must be removed after it."""

    process: subprocess.Popen[bytes] | None = None
    uid: socket.socket | None = None
    cgroup: list[Path] = field(default_factory=list)
    folder: str | None = None


class Launcher:
    """Serves the requests of one sandbox.

    Args:
        settings: `level`, `bwrap`, `machine`, `python`, `arguments` and `agent` (of the session's interpreter), `folders`
            (to show inside), `memory`, `disk` (bytes), `processes`, and `drop_to` (a user id to become, for tests, or None).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.sessions: dict[int, Session] = {}
        self.unremoved: list[Session] = []
        """Ended sessions whose cgroups the kernel had not released in time. They keep their user ids until then."""
        self.cgroups: cgroups.Cgroups | None = None
        if settings["level"] == "rlimits":
            _prctl(_SUBREAPER, 1, 0, 0, 0)
            return
        self.filter = seccomp.program(settings["machine"])
        self.folders = _stage(settings["folders"]) if os.getuid() == 0 else {f: f for f in settings["folders"]}
        if settings["drop_to"] is not None:
            _become(settings["drop_to"])
        if settings["level"] == "isolated_uid":
            self.cgroups = cgroups.Cgroups()
            self.cgroups.remove_abandoned()

    def describe(self) -> dict[str, Any]:
        """The cgroup controllers that limit the sessions, for the log."""
        return {"controllers": sorted(self.cgroups.parents) if self.cgroups else []}

    def open(self, number: int, descriptors: list[int]) -> dict[str, Any]:
        """Start a session.

        Args:
            number: Number by which the client refers to the session.
            descriptors: The session's end of the channel, and a file for its error messages.
        """
        channel, errors = descriptors
        try:
            if self.settings["level"] == "rlimits":
                session = self._start_uncontained(channel, errors)
            else:
                session = self._start_contained(number, channel, errors)
        finally:
            os.close(channel)
            os.close(errors)
        self.sessions[number] = session
        return {}

    def _start_contained(self, number: int, channel: int, errors: int) -> Session:
        settings = self.settings
        session = Session()
        uid = None
        if settings["level"] == "isolated_uid":
            session.uid, uid = _claim_uid()
        if self.cgroups is not None:
            limits = {
                "memory": settings["memory"] + 2 * settings["disk"] + _OVERHEAD,
                "pids": settings["processes"] + _CONTROL_PROCESSES,
            }
            session.cgroup = self.cgroups.create(f"{cgroups.PREFIX}{os.getpid()}_{number}", limits)
        reader, writer = os.pipe()
        try:
            os.write(writer, self.filter)
            os.close(writer)
            arguments = _bubblewrap(
                settings["bwrap"],
                self._command_of_session(channel, home=HOME, contained=True),
                folders=self.folders,
                disk_bytes=settings["disk"],
                seccomp=reader,
            )
            session.process = _start(arguments, errors, (channel, reader), _prepare(session.cgroup, uid), env={})
        except BaseException:
            _remove(session)
            raise
        finally:
            os.close(reader)
        return session

    def _start_uncontained(self, channel: int, errors: int) -> Session:
        folder = tempfile.mkdtemp(prefix=cgroups.PREFIX)
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        command = self._command_of_session(channel, home=folder, contained=False)
        process = _start(command, errors, (channel,), _prepare([], None), env=environment)
        return Session(process=process, folder=folder)

    def _command_of_session(self, channel: int, *, home: str, contained: bool) -> list[str]:
        settings = self.settings
        values = {"contained": int(contained), "home": home, **settings["arguments"]}
        arguments = [f"{name}={value}" for name, value in values.items()]
        return [settings["python"], "-I", "-S", "-X", "utf8", "-c", settings["agent"], str(channel), *arguments]

    def close(self, number: int) -> dict[str, Any]:
        """Kill a session and remove everything that belongs to it.

        Returns:
            `ended_by`: why something other than its programs had ended it before, or None.
        """
        session = self.sessions.pop(number, None)
        ended_by = None
        if session is not None and session.process is not None:
            ended_by = self._ended_by(session.process.poll())
            # The processes inside end with bubblewrap, because it is the parent of their process namespace's first process.
            _kill_group(session.process.pid)
            session.process.wait()
            if session.folder is not None:
                self._kill_orphans()
            self.unremoved = [ended for ended in self.unremoved if not _remove(ended, wait_s=0.0)]
            if not _remove(session):
                self.unremoved.append(session)
        return {"ended_by": ended_by}

    def _ended_by(self, status: int | None) -> str | None:
        """What ended bubblewrap, which the programs inside cannot reach.

        Without bubblewrap, the process is the one inside, which they can kill.
        """
        if status is None or status >= 0 or self.settings["level"] == "rlimits":
            return None
        return f"the process that contains it was killed by signal {-status}"

    def _kill_orphans(self) -> None:
        """Without a process namespace: processes whose parents have exited become children of this process."""
        known = {session.process.pid for session in self.sessions.values() if session.process is not None}
        while True:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            orphans = [int(pid) for pid in children if int(pid) not in known]
            if not orphans:
                return
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def close_all(self) -> None:
        """Close every session."""
        for number in list(self.sessions):
            self.close(number)


def serve(control: socket.socket, parent: int) -> None:
    """Answer requests until the socket is closed or the parent has ended.

    Args:
        control: A socket of packets.
        parent: The process id of the sandbox's user.
    """
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    packet = control.recv(PACKET)
    launcher = _answer(control, lambda: Launcher(json.loads(packet)), lambda made: made.describe())
    if launcher is None:
        return
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(watched, selectors.EVENT_READ)
    try:
        while all(key.fileobj is control for key, _ in selector.select()):
            packet, descriptors, _, _ = socket.recv_fds(control, PACKET, 2)
            if not packet:
                return
            request = json.loads(packet)
            if request["operation"] == "open":
                _answer(control, lambda: launcher.open(request["session"], descriptors), dict)  # noqa: B023
            else:
                _answer(control, lambda: launcher.close(request["session"]), dict)  # noqa: B023
    finally:
        launcher.close_all()


def _answer(control: socket.socket, act: Callable[[], Any], reply: Callable[[Any], dict[str, Any]]) -> Any:
    """Send the result of a request, or its error; returns the result, or None after an error."""
    try:
        result = act()
        answer = reply(result)
    except (OSError, subprocess.SubprocessError) as error:
        result, answer = None, {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):  # the parent has ended, which the caller notices
        control.send(json.dumps(answer).encode())
    return result


def _bubblewrap(
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


def _start(
    command: list[str],
    errors: int,
    descriptors: tuple[int, ...],
    prepare: Callable[[], None],
    *,
    env: dict[str, str],
) -> subprocess.Popen[bytes]:
    # An empty environment: /proc/1/environ inside shows the one with which bubblewrap was started. `preexec_fn` is safe because
    # this process has one thread.
    return subprocess.Popen(
        command,
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=descriptors,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _prepare(cgroup: list[Path], uid: int | None) -> Callable[[], None]:
    launcher = os.getpid()

    def prepare() -> None:
        cgroups.enter(cgroup)
        if uid is not None:
            _become(uid)
        # bubblewrap does the same, but later. A change of the user id would undo it, so it is last.
        _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)

    return prepare


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _claim_uid() -> tuple[socket.socket, int]:
    """A user id that no other session on this machine uses.

    An abstract socket is the lock: the kernel releases it with the process, and it leaves no file.
    """
    for uid in range(FIRST_UID, LAST_UID + 1):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0rl_sandbox_uid_{uid}")
        except OSError:
            claim.close()
            continue
        return claim, uid
    raise OSError(f"all user ids from {FIRST_UID} to {LAST_UID} are used by other sessions: close some first")


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _remove(session: Session, **wait: float) -> bool:
    """Remove what belongs to an ended session; returns False if its cgroup is still in use, so that nothing is reused yet."""
    if not cgroups.remove(session.cgroup, **wait):
        return False
    if session.uid is not None:
        session.uid.close()
    if session.folder is not None:
        shutil.rmtree(session.folder, ignore_errors=True)
    return True


_STAGE = Path("/tmp")
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _stage(folders: list[str]) -> dict[str, str]:
    """Where other users can read each folder, by its original path; a private one, such as `/root`, is mounted elsewhere.

    Only possible and only needed as root. The mounts are in a namespace that only this process and its children see.

    Raises:
        OSError: Mounting is not permitted.
    """
    closed = [folder for folder in folders if not _readable_by_all(Path(folder))]
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


def _readable_by_all(folder: Path) -> bool:
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
