"""The sandbox on this machine: finds the strongest isolation that works, and opens sessions.

Whether a session is isolated is tested by experiment, because a setting may be accepted and have no effect.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import marshal
import os
import platform
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from rl_sandbox import interpreter, seccomp
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, SandboxError, SandboxInterface, SandboxUnavailableError, SessionInterface
from rl_sandbox.launcher_client import LauncherClient
from rl_sandbox.programs import OWN_FILE
from rl_sandbox.session import LocalSession

_log = logging.getLogger("rlcore.sandbox")
_MIB = 1 << 20


class Level(Enum):
    """How sessions are isolated, strongest first."""

    ISOLATED_UID = "isolated_uid"
    """Root: each session has its own user id, namespaces (bubblewrap), a system call filter, and a cgroup if writable."""
    USER_NAMESPACE = "user_namespace"
    """Any user: namespaces and a system call filter. Sessions run as that user, without access to its files."""
    RLIMITS = "rlimits"
    """Resource limits only: no isolation."""

    def at_least(self, required: Level) -> bool:
        """Whether this level is as strong as another one."""
        order = list(Level)
        return order.index(self) <= order.index(required)


class LocalSandbox(SandboxInterface):
    """Sessions on this machine. A process starts them; it is started with the sandbox and ends with it.

    Args:
        config: `SandboxConfig`, a dict of its keys, or None for its defaults.
        level: Use this level only; None tries all that are allowed, strongest first.
        drop_to: Become this user id before sessions start. For tests of `user_namespace` as root.

    Attributes:
        level: The isolation level in use.

    Raises:
        SandboxUnavailableError: No allowed level works; names the reason for each and what to change.
    """

    def __init__(
        self,
        config: SandboxConfig | Mapping[str, Any] | None = None,
        *,
        level: Level | None = None,
        drop_to: int | None = None,
    ) -> None:
        self.config = config if isinstance(config, SandboxConfig) else SandboxConfig(**(config or {}))
        self._drop_to = drop_to
        self._lock = threading.Lock()
        self._sessions: set[LocalSession] = set()
        self._interpreter = interpreter.find_interpreter(self.config.python)
        self._launcher, self.level = self._strongest([level] if level else self._allowed())
        limits = ", ".join(self.controllers)
        _log.info("sandbox: level %s, %s", self.level.value, f"cgroup: {limits}" if limits else "no cgroup")

    def _allowed(self) -> list[Level]:
        required = Level(self.config.require)
        return [level for level in Level if level.at_least(required)]

    def _strongest(self, levels: list[Level]) -> tuple[LauncherClient, Level]:
        reasons = []
        for level in levels:
            try:
                return self._try(level), level
            except SandboxError as error:
                reasons.append(f"  {level.value}: {_explain(str(error))}.")
        if Level.RLIMITS not in levels:
            reasons.append("Only for programs that you trust: `sandbox.require: rlimits` limits resources, without isolation.")
        listed = "\n".join(reasons)
        raise SandboxUnavailableError(
            f"No sandbox of the required strength works on this machine (sandbox.require: {self.config.require}):\n{listed}"
        )

    def _try(self, level: Level) -> LauncherClient:
        """Start a launcher of this level and test a session of it; raises SandboxError with the reason if that fails."""
        self._check_machine(level)
        launcher = LauncherClient(self._settings(level))
        try:
            with self._open(launcher) as session:
                started = session.run_program("", timeout_s=30.0)
                if started.exit_code != 0:  # what bubblewrap or the interpreter wrote
                    raise SandboxError(session.start_errors() or started.stderr)
                if flaws := _find_flaws(session, level, self.config):
                    raise SandboxError("; ".join(flaws))
        except SandboxError:
            launcher.close()
            raise
        return launcher

    def _check_machine(self, level: Level) -> None:
        if level is Level.RLIMITS:
            return
        if level is Level.ISOLATED_UID and os.getuid() != 0:
            raise SandboxError("only root can give each session its own user id")
        if shutil.which("bwrap") is None:
            raise SandboxError(
                "bubblewrap is not installed: install the system package that provides the command `bwrap` "
                "(`apt-get install bubblewrap`, `dnf install bubblewrap`)"
            )
        if platform.machine() not in seccomp.ARCHITECTURES:
            raise SandboxError(f"there is no system call filter for {platform.machine()}, only for x86_64 and aarch64")

    def _settings(self, level: Level) -> dict[str, Any]:
        config, python = self.config, self._interpreter
        memory, disk = config.memory_mb * _MIB, config.disk_mb * _MIB
        return {
            "level": level.value,
            "bwrap": shutil.which("bwrap"),
            "machine": platform.machine(),
            "python": python.executable,
            "agent": agent_source(python.bytecode),
            "arguments": {
                "memory": memory,
                "processes": config.max_processes,
                "disk": disk,
                "output": config.output_kb * 1024,
                "paths": ":".join(python.package_folders) if config.packages else "",
            },
            "folders": interpreter.with_packages(python) if config.packages else python.folders,
            "memory": memory,
            "disk": disk,
            "processes": config.max_processes,
            "drop_to": self._drop_to,
        }

    def open_session(self) -> LocalSession:
        with self._lock:
            if not self._launcher.alive:
                _log.warning("sandbox: the launcher exited with all its sessions; starting a new one")
                self._launcher.close()
                self._launcher = LauncherClient(self._settings(self.level))
            launcher = self._launcher
        return self._open(launcher)

    def _open(self, launcher: LauncherClient) -> LocalSession:
        own_end, other_end = socket.socketpair()
        errors = os.memfd_create("rl_sandbox_errors")
        try:
            with other_end:
                number = launcher.open(other_end, errors)
        except SandboxError:
            own_end.close()
            os.close(errors)
            raise
        session = LocalSession(
            own_end,
            errors,
            lambda: self._ended(session, launcher, number),
            timeout_s=self.config.timeout_s,
            output=self.config.output_kb * 1024,
        )
        self._sessions.add(session)
        return session

    def _ended(self, session: LocalSession, launcher: LauncherClient, number: int) -> str | None:
        self._sessions.discard(session)
        return launcher.end(number)

    @property
    def controllers(self) -> tuple[str, ...]:
        """The cgroup controllers that limit each session; none without a cgroup."""
        return tuple(self._launcher.facts["controllers"])

    @property
    def process_id(self) -> int:
        """Process id of the launcher."""
        return self._launcher.process_id

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()
        self._launcher.close()


_CAUSES = (
    (
        ("No permissions to create new namespace", "Creating new namespace failed", "setting up uid map", "RTM_NEWADDR"),
        "this system does not let users create user namespaces. As root, run `sysctl -w user.max_user_namespaces=15000`, and "
        "where they exist `sysctl -w kernel.unprivileged_userns_clone=1` and `sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0`; in a container, start it with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined`",
    ),
    (
        ("mount proc on", "Failed to make / slave", "pivot_root"),
        "a container hides parts of /proc or forbids mounts. Start it with `--security-opt systempaths=unconfined "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined`",
    ),
    (("Unknown option",), "this version of bubblewrap is too old: 0.6.0 or newer is needed"),
    (
        ("PermissionError", "Operation not permitted (mounting"),
        "the process is root without the capabilities SETUID, SETGID and SYS_ADMIN, as in a container: give it these, or use "
        "an interpreter that all users can read (`sandbox.python`)",
    ),
)


def _explain(error: str) -> str:
    """An error of bubblewrap or of the launcher, with what to do about it if that is known."""
    text = " ".join(error.split()) or "it ended without an error message"
    for signs, advice in _CAUSES:
        if any(sign in text for sign in signs):
            return f"{text}: {advice}"
    return text


_PROBE = """
import importlib, json, os, socket, time
secret, port, processes, memory, packages, contained = json.loads(input())
found = []
try:
    bytearray(memory + (64 << 20))
    found.append("the memory limit has no effect")
except MemoryError:
    pass
for name in packages:
    try:
        importlib.import_module(name)
    except Exception as error:
        found.append(f"package {name}: {type(error).__name__}: {error}")
if contained:
    if os.path.exists(secret):
        found.append("files of the host are visible")
    try:
        socket.create_connection(("127.0.0.1", port), 1.0)
        found.append("the network of the host is reachable")
    except OSError:
        pass
    if len([name for name in os.listdir("/proc") if name.isdigit()]) > 8:
        found.append("processes of the host are visible")
    started = 0
    try:
        while started <= processes:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            started += 1
        found.append("the limit of processes has no effect")
    except BlockingIOError:
        pass
print(json.dumps(found))
"""


def _find_flaws(session: SessionInterface, level: Level, config: SandboxConfig) -> list[str]:
    """Run the probe; returns what is wrong, nothing if a new session is isolated and limited as it should be."""
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as secret:
        limits = [config.max_processes, config.memory_mb * _MIB, config.packages]
        facts = [secret.name, server.getsockname()[1], *limits, level is not Level.RLIMITS]
        result = session.run_program(_PROBE, stdin=json.dumps(facts) + "\n", timeout_s=60.0)
    if result.outcome is not Outcome.OK:
        return [f"the test program ended with {result.outcome.value}: {result.stderr.strip() or 'no message'}"]
    flaws: list[str] = json.loads(result.stdout)
    return flaws


_AGENT_MODULES = ("wire", "programs", "agent")
_BOOT = """
import marshal, sys
sys.modules["rl_sandbox"] = type(sys)("rl_sandbox")
for name, code in {modules}:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(code if type(code) is not str else compile(code, {file!r}, "exec"), module.__dict__)
sys.modules["rl_sandbox.agent"].main(sys.argv[1:])
"""


@functools.cache
def agent_source(magic: str) -> str:
    """The agent as one piece of source code, because the package is not visible inside a sandbox.

    It defines the agent's modules and serves a session; its arguments are those of `rl_sandbox.agent.main`.

    Args:
        magic: The bytecode version of the interpreter inside, in hexadecimal. If it is this interpreter's, the modules are
            compiled here, which saves a quarter of the start time.
    """
    folder = Path(__file__).parent
    sources = [(f"rl_sandbox.{name}", (folder / f"{name}.py").read_text()) for name in _AGENT_MODULES]
    if magic != importlib.util.MAGIC_NUMBER.hex():
        return _BOOT.format(modules=repr(sources), file=OWN_FILE)
    compiled = marshal.dumps([(name, compile(source, OWN_FILE, "exec")) for name, source in sources])
    return _BOOT.format(modules=f'marshal.loads(bytes.fromhex("{compiled.hex()}"))', file=OWN_FILE)
