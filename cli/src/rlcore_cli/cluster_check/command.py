"""Runs `rlcore doctor --cluster` and prints its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rl_core.cluster.ray_runtime import refuse_silent_port
from rl_core.errors import UserError
from rlcore_cli.cluster_check.findings import Finding, findings_of
from rlcore_cli.cluster_check.node_probe import NodeReport
from rlcore_cli.cluster_check.nodes import Survey, survey_nodes
from rlcore_cli.cluster_check.questions import questions_of
from rlcore_cli.listing import print_table

_SHOWN = ("rlcore", "ray", "torch")


def check_cluster(config: Path | None, overrides: list[str], *, timeout_s: float, as_json: bool) -> bool:
    """Prints a table of the nodes and all problems; returns whether a run would work.

    Raises:
        UserError: This process cannot join the cluster, or the config is invalid.
    """
    questions = questions_of(config, overrides)
    address = refuse_if_unreachable(timeout_s)
    survey = survey_nodes(questions, timeout_s=timeout_s)
    findings = findings_of(survey, questions)
    healthy = not any(finding.status == "error" for finding in findings)
    if as_json:
        print(json.dumps(_plain(address, survey, findings, healthy=healthy), indent=2))
    else:
        _print(address, survey, findings)
    return healthy


def _plain(address: str, survey: Survey, findings: list[Finding], *, healthy: bool) -> dict[str, object]:
    return {
        "address": address,
        "healthy": healthy,
        "nodes": [
            {"name": name, **asdict(node), "report": asdict(answer) if isinstance(answer, NodeReport) else None}
            for name, node in survey.nodes.items()
            for answer in [survey.reports[name]]
        ],
        "mib_per_s": [{"from": a, "to": b, "value": v} for (a, b), v in survey.mib_per_s.items() if not isinstance(v, str)],
        "problems": [asdict(finding) for finding in findings],
    }


def _print(address: str, survey: Survey, findings: list[Finding]) -> None:
    count = len(survey.nodes)
    print(f"Ray at {address}: {count} {'node' if count == 1 else 'nodes'}")
    rows = [["  node", "host", "Python", *_SHOWN, "free CPUs", "free GPUs"]]
    for name, node in survey.nodes.items():
        answer = survey.reports[name]
        resources = [f"{node.free_cpus:g} of {node.cpus:g}", f"{node.free_gpus:g} of {node.gpus:g}"]
        if isinstance(answer, NodeReport):
            seen = [answer.host, answer.python, *(answer.versions.get(library, "none") for library in _SHOWN)]
        else:
            seen = ["no answer", *[""] * (len(_SHOWN) + 1)]
        rows.append([f"  {name}", *seen, *resources])
    print_table(rows)
    if survey.mib_per_s:
        print("network")
        print_table(
            [
                [f"  {sender} -> {receiver}", speed if isinstance(speed, str) else f"{speed:,.0f} MiB/s"]
                for (sender, receiver), speed in survey.mib_per_s.items()
            ]
        )
    for finding in findings:
        text = finding.text.replace("\n", "\n    ")
        print(f"{finding.status.upper()}  {finding.node or 'cluster'}: {text}")
    if not findings:
        print("ok  versions, plugins, paths, shared folders, connections, clocks, resources")


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
