"""The interpreter that runs inside the sandbox: its executable and the folders that it needs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_sandbox.interface import SandboxUnavailableError

_QUERY = """
import importlib.util, json, os, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "version": sys.version_info[:2],
    "bytecode": importlib.util.MAGIC_NUMBER.hex(),
    "roots": [sys.base_prefix, sys.base_exec_prefix, paths["stdlib"], paths["platstdlib"]],
    "packages": [paths["purelib"], paths["platlib"]],
}))
"""
_OLDEST = (3, 9)


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python interpreter of this machine.

    Attributes:
        executable: The real file, outside of any virtual environment.
        bytecode: Version of its bytecode, in hexadecimal.
        folders: Folders that it needs, other than those below `/usr`.
        package_folders: Its `site-packages` folders, the ones of the virtual environment if it is in one.
    """

    executable: str
    bytecode: str
    folders: tuple[str, ...]
    package_folders: tuple[str, ...]


@functools.cache
def find_interpreter(python: str | None) -> Interpreter:
    """Find the folders that a Python interpreter needs.

    Args:
        python: Path of the executable; this process's interpreter if None.

    Raises:
        SandboxUnavailableError: It does not run, is too old, or can only be made visible together with a whole home folder.
    """
    path = python or sys.executable
    try:
        process = subprocess.run([path, "-I", "-c", _QUERY], capture_output=True, text=True, timeout=60, check=True, env={})
        facts = json.loads(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxUnavailableError(
            f"sandbox.python: {path!r} did not run as a Python interpreter ({error}). Give the path of one."
        ) from error
    if tuple(facts["version"]) < _OLDEST:
        raise SandboxUnavailableError(f"sandbox.python: {path} is Python {facts['version']}, but 3.9 or newer is needed.")
    folders = _outermost([facts["executable"].rpartition("/")[0], *facts["roots"]])
    for folder in folders:
        if folder in (Path("/"), Path("/home"), Path("/root"), Path("/etc"), Path.home()):
            raise SandboxUnavailableError(
                f"sandbox.python: {path} is installed in {folder}, so a sandbox with it would show that whole folder. "
                "Choose an interpreter that has its own folder, such as /usr/bin/python3."
            )
    return Interpreter(
        executable=facts["executable"],
        bytecode=facts["bytecode"],
        folders=tuple(map(str, folders)),
        package_folders=tuple(dict.fromkeys(facts["packages"])),
    )


def _outermost(folders: list[str]) -> list[Path]:
    """The folders without those inside others or inside `/usr`."""
    paths = sorted({Path(os.path.realpath(folder)) for folder in folders})
    kept = [Path("/usr")]
    for path in paths:
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept[1:]


def with_packages(interpreter: Interpreter) -> tuple[str, ...]:
    """All folders that a sandbox with this interpreter and its packages must show."""
    return tuple(map(str, _outermost([*interpreter.folders, *interpreter.package_folders])))
