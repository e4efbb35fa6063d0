"""Tests by experiment whether a session is isolated; a setting that is accepted but has no effect is found this way."""

from __future__ import annotations

import json
import socket
import tempfile

from rl_sandbox.interface import Outcome, SessionInterface
from rl_sandbox.levels import Level

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


def find_flaws(session: SessionInterface, level: Level, *, processes: int, memory: int, packages: tuple[str, ...]) -> list[str]:
    """Run the probe; returns what is wrong, nothing if the session is isolated as its level promises.

    Args:
        session: A new session.
        level: What it should be.
        processes: Its limit of processes.
        memory: Its limit of memory per process, in bytes.
        packages: Modules that must be importable.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as secret:
        facts = [secret.name, server.getsockname()[1], processes, memory, packages, level is not Level.RLIMITS]
        result = session.run_program(_PROBE, stdin=json.dumps(facts) + "\n", timeout_s=60.0)
    if result.outcome is not Outcome.OK:
        return [f"the test program ended with {result.outcome.value}: {result.stderr.strip() or 'no message'}"]
    flaws: list[str] = json.loads(result.stdout)
    return flaws
