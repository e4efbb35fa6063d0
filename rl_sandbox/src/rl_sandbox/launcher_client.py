"""Starts the launcher's process and sends it requests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_sandbox.interface import SandboxError
from rl_sandbox.launcher import PACKET

_TIMEOUT_S = 60.0
_EXIT_S = 5.0
# `-I` and `-S` skip site-packages, whose start-up files would slow down the process.
_MAIN = "import sys, os, socket; sys.path.insert(0, sys.argv[3]); from rl_sandbox.launcher import serve; " + (
    "serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))"
)


class LauncherClient:
    """A running launcher. Its methods may be called from any thread.

    Args:
        settings: See `rl_sandbox.launcher.Launcher`.

    Raises:
        SandboxError: It did not start; the text is the launcher's error.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(theirs.fileno()), str(os.getpid()), _source_folder()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal must not end it before the process that uses it
            )
        self._control.settimeout(_TIMEOUT_S)
        try:
            self.facts = self._request(settings)
        except SandboxError:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the launcher process is running."""
        return self._process.poll() is None

    def open(self, channel: socket.socket, errors: int) -> int:
        """Start a session; returns its number.

        Args:
            channel: The end of the channel for the session.
            errors: A file for its error messages.
        """
        with self._lock:
            self._next += 1
            number = self._next
            self._request({"operation": "open", "session": number}, (channel.fileno(), errors))
            return number

    def end(self, number: int) -> str | None:
        """Kill a session and delete its files and cgroups.

        Returns:
            Reason, if the session had already been ended by something other than its programs, such as an exit of the
            launcher; otherwise None.
        """
        with self._lock:
            try:
                reason: str | None = self._request({"operation": "close", "session": number})["ended_by"]
                return reason
            except SandboxError:
                if self.alive:
                    raise
                return f"its launcher (process {self.process_id}) exited"

    def close(self) -> None:
        """End the launcher and with it all sessions."""
        with self._lock:
            self._control.close()
        try:
            self._process.wait(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            packet = self._control.recv(PACKET)
        except TimeoutError as error:
            # A late reply would be taken for the reply to the next request. The sessions end with the launcher.
            self._process.kill()
            self._process.wait()
            raise SandboxError(
                f"The launcher of the sandbox did not answer within {self._control.gettimeout():g} seconds and was killed."
            ) from error
        except OSError as error:
            self._await_exit()
            raise SandboxError(f"The launcher of the sandbox does not answer ({error}).") from error
        if not packet:
            self._await_exit()
            raise SandboxError("The launcher of the sandbox exited; its error message is in the log of this process.")
        answer: dict[str, Any] = json.loads(packet)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer

    def _await_exit(self) -> None:
        """Its socket is closed before its process has ended; `alive` should be false after an error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_S)


def _source_folder() -> str:
    return str(Path(__file__).resolve().parents[1])
