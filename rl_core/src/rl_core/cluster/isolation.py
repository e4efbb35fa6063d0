"""Runs workers with another Python interpreter, so that trainer and sampler may use different package versions."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray

from rl_core.errors import UserError

_PROBE = """
import json, sys
found = {"python": "%d.%d" % sys.version_info[:2], "ray": None, "rl_core": None}
try:
    import ray
    found["ray"] = ray.__version__
except Exception as error:
    found["ray_error"] = repr(error)
try:
    import rl_core.cluster
    found["rl_core"] = rl_core.cluster.__file__
except Exception as error:
    found["rl_core_error"] = repr(error)
print("rlcore-probe " + json.dumps(found))
"""


def runtime_env_of(python: str | Path | None) -> dict[str, Any]:
    """The Ray runtime environment that runs workers with this interpreter, on every node at the same path; empty for None.

    Raises:
        UserError: It does not exist or run, its Python or Ray version differs from the driver's, or it lacks rl-core.
    """
    if python is None:
        return {}
    # Not resolved: a virtual environment's interpreter is a link, and only the link's own path selects the environment.
    path = Path(python).expanduser().absolute()
    _check(str(path))
    return {"py_executable": str(path)}


@lru_cache(maxsize=64)
def _check(path: str) -> None:
    if not Path(path).is_file():
        raise UserError(
            f"python: {path} does not exist. Create the environment (`python -m venv DIR`, then install rl-core and "
            "the backend into it) and set the path of its bin/python."
        )
    versions = _probe(path)
    driver = f"{sys.version_info[0]}.{sys.version_info[1]}"
    problems = []
    if versions["python"] != driver:
        problems.append(f"it is Python {versions['python']}, but the driver is {driver}: create it with python{driver}")
    if versions["ray"] is None:
        problems.append(f"it cannot import ray ({versions['ray_error']}): install ray=={ray.__version__} into it")
    elif versions["ray"] != ray.__version__:
        problems.append(f"it has ray {versions['ray']}, but the driver {ray.__version__}: install ray=={ray.__version__}")
    if versions["rl_core"] is None:
        problems.append(f"it cannot import rl_core ({versions['rl_core_error']}): install rl-core into it")
    if problems:
        raise UserError(f"python: {path} cannot run workers of this Ray:\n" + "\n".join(f"- {one}" for one in problems))


def _probe(path: str) -> dict[str, Any]:
    try:
        run = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"python: {path} does not run: {error}. Set the path of an interpreter.") from error
    for line in run.stdout.splitlines():
        if line.startswith("rlcore-probe "):
            versions: dict[str, Any] = json.loads(line.removeprefix("rlcore-probe "))
            return versions
    raise UserError(
        f"python: {path} does not behave like a Python interpreter (exit status {run.returncode}): "
        f"{run.stderr.strip()[-500:] or 'it printed nothing'}. Set the path of a bin/python."
    )
