"""Runs model-written code in a fork of the agent: takes the pipes, sets the limits, runs, and returns an exit code.

Standard library only; used inside the sandbox.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import struct
import sys
import types

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

OWN_FILE = "<sandbox>"
"""File name of the modules of this package inside the sandbox; their frames are not part of a program's traceback."""
SIGKILL = 9
_CHUNK = 1 << 16
_PDEATHSIG, _DUMPABLE = 1, 4
_prctl = ctypes.CDLL(None).prctl


def bind_to_parent() -> None:
    """End this process when its parent ends."""
    _prctl(_PDEATHSIG, SIGKILL, 0, 0, 0)


def protect(protected: bool) -> None:
    """Set whether processes of the same user are prevented from reading this one's memory, tracing it and taking its files."""
    _prctl(_DUMPABLE, int(not protected), 0, 0, 0)


class Settings:
    """Limits and paths, from the command line: one `name=value` each."""

    def __init__(self, arguments: list[str]) -> None:
        values = dict(argument.split("=", 1) for argument in arguments)
        self.contained = values["contained"] == "1"
        self.home = values["home"]
        self.memory = int(values["memory"])
        self.processes = int(values["processes"])
        self.disk = int(values["disk"])
        self.output = int(values["output"])
        self.paths = [path for path in values["paths"].split(":") if path]


def become_program(settings: Settings, cpu_s: float | None, descriptors: tuple[int | None, ...]) -> None:
    """In a forked process: make the given pipes its standard streams, close all other descriptors and set the limits."""
    os.setsid()
    bind_to_parent()
    # Above the targets, so that no dup2 overwrites a source.
    moved = [os.dup2(d, 100 + i) for i, d in enumerate(descriptors) if d is not None]
    for target, descriptor in enumerate(moved):
        os.dup2(descriptor, target, inheritable=target < 3)
    os.closerange(len(moved), 1024)
    protect(False)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    limits = [
        (resource.RLIMIT_AS, settings.memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings.disk),
        (resource.RLIMIT_NOFILE, 256),
    ]
    if settings.contained:
        limits.append((resource.RLIMIT_NPROC, settings.processes))
    if cpu_s is not None:
        limits.append((resource.RLIMIT_CPU, int(cpu_s) + 2))
    for limit, value in limits:
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.umask(0o077)
    os.chdir(settings.home)
    sys.argv = ["main.py"]
    sys.path[:] = [settings.home, *sys.path, *settings.paths]


def _new_main() -> ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = "main.py"
    sys.modules["__main__"] = main
    return main


def run_main(code: bytes) -> int:
    """Run a program as Python itself would; returns its exit code."""
    main = _new_main()
    sources = {"main.py": code}
    status = _guarded(lambda: exec(compile(code, "main.py", "exec"), main.__dict__), sources)
    if "threading" in sys.modules:
        status = _guarded(sys.modules["threading"]._shutdown, sources) or status
    atexit._run_exitfuncs()
    return _flushed(status)


def interpret(done: int) -> int:
    """Run pieces of code in one namespace; writes "0" or "1" to `done` after each."""
    import ast

    main = _new_main()
    sources: dict[str, bytes] = {}
    stdin = os.dup(0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    while header := read(stdin, 4):
        file = f"<call {len(sources) + 1}>"
        sources[file] = read(stdin, struct.unpack("!I", header)[0])
        status = _flushed(_guarded(_piece(ast, sources[file], main.__dict__, file), sources))
        os.write(done, b"0" if status == 0 else b"1")
    return 0


def _piece(ast: Any, code: bytes, namespace: dict[str, Any], file: str) -> Callable[[], None]:
    return lambda: _execute(ast, code, namespace, file)


def _execute(ast: Any, code: bytes, namespace: dict[str, Any], file: str) -> None:
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
        if value is not None:
            print(repr(value))


def _guarded(call: Callable[[], object], sources: dict[str, bytes]) -> int:
    """Call, print an exception as Python would, and return the exit code.

    Args:
        call: what to run.
        sources: code by file name, for the lines of the traceback.
    """
    try:
        call()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _print_exception(error, sources)
        return 1
    return 0


def _print_exception(error: BaseException, sources: dict[str, bytes]) -> None:
    # Imported here: they take longer than most programs.
    import linecache
    import traceback

    for file, code in sources.items():
        text = code.decode("utf-8", "replace")
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == OWN_FILE:
        trace = trace.tb_next  # frames of this module
    traceback.print_exception(type(error), error.with_traceback(trace), trace)


def _flushed(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            status = status or 120  # Python's exit code if a stream cannot be flushed
    return status


def read(descriptor: int, size: int) -> bytes:
    """Exactly `size` bytes; none at the end of the file."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(size - len(data), _CHUNK))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)
