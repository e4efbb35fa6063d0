"""Runs `rlcore doctor --cluster`: what the survey of the nodes means for a run, one finding per problem, with what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rl_core.cluster.placement import Request, insufficient, plan
from rl_core.cluster.ray_runtime import refuse_silent_port
from rl_core.errors import RLCoreError, UserError
from rlcore_cli.arguments import counted
from rlcore_cli.cluster_check.nodes import NodeReport, Questions, Survey, questions_of, survey_nodes
from rlcore_cli.listing import Finding, print_table

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
        "problems": [
            {"node": each.subject, "check": each.check, "status": each.status, "text": each.text} for each in findings
        ],
    }


def _print(address: str, survey: Survey, findings: list[Finding]) -> None:
    print(f"Ray at {address}: {counted(len(survey.nodes), 'node')}")
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
        print(f"{finding.status.upper()}  {finding.subject or 'cluster'}: {text}")
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


_SKEW_S = 5.0
_READ_BY_DRIVER = "data."


def findings_of(survey: Survey, questions: Questions) -> list[Finding]:
    """All problems."""
    found = [Finding(node, "answer", str(answer)) for node, answer in survey.reports.items() if isinstance(answer, RLCoreError)]
    for node, answer in survey.reports.items():
        if isinstance(answer, NodeReport):
            found += _against(survey.here, answer, node, questions)
    return [*found, *_shared(survey, questions), *_network(survey), *_clocks(survey), *_resources(survey, questions)]


def _against(here: NodeReport, there: NodeReport, node: str, questions: Questions) -> Iterator[Finding]:
    """Differences between the node and this process."""
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        yield Finding(node, "Python", f"Python {there.python} instead of {here.python}: use the same interpreter on all nodes.")
    for name, version, other in _differences(here.versions, there.versions):
        if other is None:
            yield Finding(node, "versions", f"{name} {version} is not installed: pip install {name}=={version} there.")
        elif version is None:
            yield Finding(node, "versions", f"{name} {other} is installed only there, not for this process.", status="warning")
        else:
            yield Finding(node, "versions", f"{name} {other} instead of {version}: pip install {name}=={version} there.")
    for name, status, other in _differences(here.plugins, there.plugins):
        if status is not None and other is not None:
            yield Finding(node, "plugins", f"plugin {name} is {other}, here {status}: run `rlcore doctor {name}` there.")
    for key, path in questions.inputs.items():
        wanted, seen = here.inputs[path], there.inputs[path]
        if seen != wanted:
            yield Finding(
                node,
                "paths",
                f"{key}: {path} {'does not exist' if seen is None else 'has other content'}. Put it on a file system that all "
                "nodes mount, or copy it to the same path."
                + (" Only the driver reads it, so a run started elsewhere works." if key.startswith(_READ_BY_DRIVER) else ""),
                status="warning" if key.startswith(_READ_BY_DRIVER) else "error",
            )


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str | None, str | None]]:
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            yield name, here.get(name), there.get(name)


def _shared(survey: Survey, questions: Questions) -> Iterator[Finding]:
    for key, folder in questions.outputs.items():
        for node, problem in survey.shared[folder].items():
            advice = f"Set {key} to a folder on a file system that all nodes mount."
            yield Finding(node, "run folder", f"{key}: {folder}: {problem}. {advice}")


def _network(survey: Survey) -> Iterator[Finding]:
    for (node, peer), speed in survey.mib_per_s.items():
        if isinstance(speed, str):
            advice = "Allow TCP on all ports between the nodes; see docs/clusters.md."
            yield Finding(node, "network", f"{node} cannot send to {peer}: {speed}. {advice}")


def _clocks(survey: Survey) -> Iterator[Finding]:
    for node, skew in survey.skews.items():
        if abs(skew) > _SKEW_S:
            where = "ahead" if skew > 0 else "behind"
            text = f"its clock is at least {abs(skew):.0f} s {where}: synchronize it (chrony, ntpd)."
            yield Finding(node, "clock", text, status="warning")


def _resources(survey: Survey, questions: Questions) -> Iterator[Finding]:
    nodes, with_gpus = list(survey.nodes.values()), None
    for key, workers in questions.workers.items():
        use_gpus = with_gpus if workers.use_gpus is None else workers.use_gpus
        entries = [workers.workers_per_node] * workers.num_nodes
        request = Request.of(entries, nodes, cpus=workers.cpus_per_worker, use_gpus=use_gpus)
        with_gpus = request.gpus_per_bundle > 0
        for free in (False, True):
            if plan(request, nodes, free=free) is None:
                yield Finding("", "resources", f"{key}: {insufficient(request, nodes, free=free)}")
                break
