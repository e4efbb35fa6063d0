"""The worker that reports about its node: versions, plugins, files, and connections to other nodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.rendezvous.interfaces import free_port

LIBRARIES = ("ray", "torch", "transformers", "safetensors", "numpy", "vllm", "megatron-core")
_SAMPLE = 2**20
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a process on a node has and sees.

    Attributes:
        host: Name of the machine.
        python: Version of the interpreter.
        versions: Installed version of each library and of each distribution with plugins.
        plugins: Status of each plugin, such as `ready`.
        inputs: Digest of each file or folder of the config; None if it does not exist.
        port: A port that is free, as for a rendezvous.
        clock: Seconds since the epoch.
    """

    host: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str | None] = field(default_factory=dict)
    port: int = 0
    clock: float = 0.0


def report(inputs: Sequence[str] = ()) -> NodeReport:
    """The report of this process; `inputs` are paths."""
    from rl_core.plugins.manager import discover

    plugins = discover(strict=False).plugins
    installed = {plugin.distribution: plugin.version for plugin in plugins if plugin.version}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NodeReport(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions=installed,
        plugins={plugin.name: plugin.status.value for plugin in plugins},
        inputs={path: digest(Path(path)) for path in inputs},
        port=free_port(),
        clock=time.time(),
    )


def digest(path: Path) -> str | None:
    """Digest of names, sizes, and the first and last MiB of each file; None if the path does not exist."""
    if not path.exists():
        return None
    total = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        total.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as content:
            total.update(content.read(_SAMPLE))
            content.seek(max(size - _SAMPLE, 0))
            total.update(content.read(_SAMPLE))
    return total.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        yield from (file for name in sorted(names) if (file := Path(folder, name)).is_file())


class NodeProbe:
    """Runs on each node as the workers of a run do."""

    def report(self, inputs: Sequence[str]) -> NodeReport:
        """The report of this node."""
        return report(inputs)

    def share(self, folder: str, written: str, own: str) -> str | None:
        """Reads the file `written` and writes `own` in a folder; returns the problem if that fails."""
        try:
            Path(folder, written).read_bytes()
        except OSError as error:
            return f"does not see what the driver writes there ({error.strerror})"
        try:
            Path(folder, own).write_bytes(b"")
        except OSError as error:
            return f"cannot write there ({error.strerror})"
        return None

    def remove(self, folder: str, own: str) -> None:
        """Removes the file that `share` wrote."""
        Path(folder, own).unlink(missing_ok=True)

    def exchange(self, port: int, peer: tuple[str, int], mib: int, timeout_s: float) -> float | str:
        """Sends data to a peer while another node sends to `port`; MiB/s, or what failed."""
        problems: list[str] = []
        receiver = threading.Thread(target=_receive, args=(port, mib, timeout_s, problems), daemon=True)
        receiver.start()
        sent = send(peer, mib, timeout_s)
        receiver.join(timeout_s)
        return f"cannot listen on port {port}: {problems[0]}" if problems else sent


def send(peer: tuple[str, int], mib: int, timeout_s: float) -> float | str:
    """Sends data to a peer that listens, or will soon; MiB/s until the peer has all of it, or what failed."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            with closing(socket.create_connection(peer, max(until - time.monotonic(), 0.1))) as connection:
                started = time.perf_counter()
                for _ in range(mib):
                    connection.sendall(bytes(_MIB))
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1) != b"k":
                    return "the connection was closed"
                return mib / (time.perf_counter() - started)
        except ConnectionRefusedError as error:
            # The peer's task may not have started yet.
            if time.monotonic() >= until:
                return str(error)
            time.sleep(0.05)
        except OSError as error:
            return str(error) or type(error).__name__


def _receive(port: int, mib: int, timeout_s: float, problems: list[str]) -> None:
    try:
        with socket.create_server(("", port)) as server:
            server.settimeout(timeout_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return  # the sender reports it
            with closing(connection):
                connection.settimeout(timeout_s)
                left = mib * _MIB
                while left > 0 and (size := len(connection.recv(_MIB))):
                    left -= size
                connection.sendall(b"k")
    except OSError as error:
        problems.append(str(error))
