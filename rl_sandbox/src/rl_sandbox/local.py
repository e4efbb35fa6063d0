"""The sandbox on this machine: finds the strongest isolation that works, and opens sessions."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import threading
from collections.abc import Mapping
from typing import Any

from rl_sandbox import interpreter, seccomp
from rl_sandbox.agent_source import agent_source
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import SandboxError, SandboxInterface, SandboxUnavailableError
from rl_sandbox.launcher_client import LauncherClient
from rl_sandbox.levels import INSTALL, NOT_ROOT, Level, explain
from rl_sandbox.probe import find_flaws
from rl_sandbox.session import LocalSession

_log = logging.getLogger("rlcore.sandbox")
_MIB = 1 << 20


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
                reasons.append(f"  {level.value}: {explain(str(error))}.")
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
            with self._open(launcher, check=True) as session:
                flaws = find_flaws(
                    session,
                    level,
                    processes=self.config.max_processes,
                    memory=self.config.memory_mb * _MIB,
                    packages=self.config.packages,
                )
                if flaws:
                    raise SandboxError("; ".join(flaws))
        except SandboxError:
            launcher.close()
            raise
        return launcher

    def _check_machine(self, level: Level) -> None:
        if level is Level.RLIMITS:
            return
        if level is Level.ISOLATED_UID and os.getuid() != 0:
            raise SandboxError(NOT_ROOT)
        if shutil.which("bwrap") is None:
            raise SandboxError(INSTALL)
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

    def _open(self, launcher: LauncherClient, *, check: bool = False) -> LocalSession:
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
        if check:
            _check_start(session)
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


def _check_start(session: LocalSession) -> None:
    """Raise what bubblewrap or the interpreter wrote if the session does not answer."""
    try:
        result = session.run_program("", timeout_s=30.0)
        if result.exit_code != 0:
            raise SandboxError(session.start_errors() or result.stderr)
    except SandboxError:
        session.close()
        raise
