"""Runs workers with another Python interpreter, so that trainer and sampler may use different package versions."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_core.errors import UserError

_PROBE = """
import importlib, importlib.metadata, json, sys
found = {"python": "%d.%d" % sys.version_info[:2]}
for name, module in (("ray", "ray"), ("rl-core", "rl_core.cluster")):
    try:
        importlib.import_module(module)
        found[name] = importlib.metadata.version(name)
    except Exception as error:
        found[name + " error"] = repr(error)
print("rlcore-probe " + json.dumps(found))
"""


@lru_cache(maxsize=64)
def runtime_env_of(python: str | Path | None) -> dict[str, Any]:
    """The Ray runtime environment that runs workers with this interpreter, on every node at the same path; empty for None.

    Raises:
        UserError: It does not exist or run, its version of Python, Ray or rl-core differs from the driver's.
    """
    if python is None:
        return {}
    # Not resolved: a virtual environment's interpreter is a link, and only the link's own path selects the environment.
    path = Path(python).expanduser().absolute()
    if not path.is_file():
        raise UserError(
            f"python: {path} does not exist. Create the environment (`python -m venv DIR`, then install rl-core and "
            "the backend into it) and set the path of its bin/python."
        )
    driver = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", **{name: version(name) for name in ("ray", "rl-core")}}
    reported = probe(str(path), _PROBE)
    problems = []
    if (own := reported.pop("python")) != driver["python"]:
        problems.append(f"it is Python {own}, but the driver is {driver['python']}: create it with python{driver['python']}")
    for name, value in reported.items():
        if name not in driver:
            problems.append(f"it cannot import {name.removesuffix(' error')} ({value})")
        elif value != driver[name]:
            problems.append(f"it has {name} {value}, but the driver {driver[name]}")
    if problems:
        raise UserError(
            f"python: {path} cannot run workers of this Ray:\n" + "\n".join(f"- {one}" for one in problems) + "\n"
            f"Install the versions of the driver: {path} -m pip install ray=={driver['ray']} rl-core=={driver['rl-core']}"
        )
    return {"py_executable": str(path)}


def probe(path: str, script: str, argument: str = "") -> dict[str, Any]:
    """Run a script with another interpreter; returns the JSON object that it prints after `rlcore-probe`.

    Raises:
        UserError: The interpreter does not run, or the script does not print one.
    """
    try:
        run = subprocess.run([path, "-c", script, argument], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"python: {path} does not run: {error}. Set the path of an interpreter.") from error
    for line in run.stdout.splitlines():
        if line.startswith("rlcore-probe "):
            return dict(json.loads(line.removeprefix("rlcore-probe ")))
    raise UserError(
        f"python: {path} does not behave like a Python interpreter (exit status {run.returncode}): "
        f"{run.stderr.strip()[-500:] or 'it printed nothing'}. Set the path of a bin/python."
    )
