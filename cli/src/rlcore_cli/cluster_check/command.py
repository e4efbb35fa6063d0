"""Runs `rlcore doctor --cluster` and prints its result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rlcore_cli.cluster_check.findings import Finding, findings_of
from rlcore_cli.cluster_check.joining import refuse_if_unreachable
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
