"""Joins the cluster of `RAY_ADDRESS` as a run does. Tried in another process first, because Ray may wait long or abort it."""

from __future__ import annotations

import os
import subprocess
import sys

from rl_core.cluster.ray_runtime import refuse_silent_port
from rl_core.errors import UserError

TOKENS = (
    "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=<the same secret> for `ray start` on every node and for the run. `ray start "
    "--head` turns tokens on by itself if it finds ~/.ray/auth_token; the other nodes and the run do not."
)
_TRIAL = """
from rl_core.cluster.ray_runtime import RayLease
RayLease().release()
"""


def refuse_if_unreachable(timeout_s: float) -> str:
    """The address of the cluster that a run would join.

    Raises:
        UserError: There is none, or this process cannot join it; says why.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise UserError(
            "RAY_ADDRESS is not set, so a run would start Ray on this machine only. Set it to the address of the head node, "
            "for example RAY_ADDRESS=10.0.0.1:6379."
        )
    refuse_silent_port(address)
    try:
        trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Ray at {address} did not let this process join within {timeout_s:g} s. Look at `ray status` on its head node."
        ) from None
    if trial.returncode:
        raise UserError(f"This process cannot join the Ray cluster at {address}. {_reason(trial.stderr)}")
    return address


def _reason(output: str) -> str:
    """The cause, from what Ray printed: its exceptions do not tell the causes apart."""
    if "AuthToken" in output or "AuthenticationError" in output:
        return f"Its token is missing or wrong. {TOKENS}"
    if "raylet_ipc_client" in output or "node" in output.rpartition("\n")[2]:
        return "This machine is not one of its nodes: start Ray here too (`ray start --address=...`), or run on a node."
    last = [line.strip() for line in output.splitlines() if line.strip()][-3:]
    return "Ray printed: " + " / ".join(last)
