"""What a survey of the nodes means for a run: one finding per problem, with the node and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rl_core.cluster.placement import Request, insufficient, plan
from rl_core.errors import RLCoreError
from rlcore_cli.cluster_check.node_probe import NodeReport
from rlcore_cli.cluster_check.nodes import Survey
from rlcore_cli.cluster_check.questions import Questions

_SKEW_S = 5.0
_READ_BY_DRIVER = "data."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem.

    Attributes:
        node: Address of the node; empty if it concerns all.
        check: What was checked.
        status: Whether a run would fail because of it.
        text: What was found, and what to do.
    """

    node: str
    check: str
    status: Literal["error", "warning"]
    text: str


def findings_of(survey: Survey, questions: Questions) -> list[Finding]:
    """All problems."""
    found = [
        _finding(node, "answer", str(answer)) for node, answer in survey.reports.items() if isinstance(answer, RLCoreError)
    ]
    for node, answer in survey.reports.items():
        if isinstance(answer, NodeReport):
            found += _against(survey.here, answer, node, questions)
    return [*found, *_shared(survey, questions), *_network(survey), *_clocks(survey), *_resources(survey, questions)]


def _finding(node: str, check: str, text: str, *, warning: bool = False) -> Finding:
    return Finding(node=node, check=check, status="warning" if warning else "error", text=text)


def _against(here: NodeReport, there: NodeReport, node: str, questions: Questions) -> Iterator[Finding]:
    """Differences between the node and this process."""
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        yield _finding(
            node, "Python", f"Python {there.python} instead of {here.python}: use the same interpreter on all nodes."
        )
    for name, version, other in _differences(here.versions, there.versions):
        if other is None:
            yield _finding(node, "versions", f"{name} {version} is not installed: pip install {name}=={version} there.")
        elif version is None:
            yield _finding(node, "versions", f"{name} {other} is installed only there, not for this process.", warning=True)
        else:
            yield _finding(node, "versions", f"{name} {other} instead of {version}: pip install {name}=={version} there.")
    for name, status, other in _differences(here.plugins, there.plugins):
        if status is not None and other is not None:
            yield _finding(node, "plugins", f"plugin {name} is {other}, here {status}: run `rlcore doctor {name}` there.")
    for key, path in questions.inputs.items():
        wanted, seen = here.inputs[path], there.inputs[path]
        if seen != wanted:
            yield _finding(
                node,
                "paths",
                f"{key}: {path} {'does not exist' if seen is None else 'has other content'}. Put it on a file system that all "
                "nodes mount, or copy it to the same path."
                + (" Only the driver reads it, so a run started elsewhere works." if key.startswith(_READ_BY_DRIVER) else ""),
                warning=key.startswith(_READ_BY_DRIVER),
            )


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str | None, str | None]]:
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            yield name, here.get(name), there.get(name)


def _shared(survey: Survey, questions: Questions) -> Iterator[Finding]:
    for key, folder in questions.outputs.items():
        for node, problem in survey.shared[folder].items():
            advice = f"Set {key} to a folder on a file system that all nodes mount."
            yield _finding(node, "run folder", f"{key}: {folder}: {problem}. {advice}")


def _network(survey: Survey) -> Iterator[Finding]:
    for (node, peer), speed in survey.mib_per_s.items():
        if isinstance(speed, str):
            advice = "Allow TCP on all ports between the nodes; see docs/clusters.md."
            yield _finding(node, "network", f"{node} cannot send to {peer}: {speed}. {advice}")


def _clocks(survey: Survey) -> Iterator[Finding]:
    for node, skew in survey.skews.items():
        if abs(skew) > _SKEW_S:
            where = "ahead" if skew > 0 else "behind"
            yield _finding(
                node, "clock", f"its clock is at least {abs(skew):.0f} s {where}: synchronize it (chrony, ntpd).", warning=True
            )


def _resources(survey: Survey, questions: Questions) -> Iterator[Finding]:
    nodes, with_gpus = list(survey.nodes.values()), None
    for key, workers in questions.workers.items():
        use_gpus = with_gpus if workers.use_gpus is None else workers.use_gpus
        entries = [workers.workers_per_node] * workers.num_nodes
        request = Request.of(entries, nodes, cpus=workers.cpus_per_worker, use_gpus=use_gpus)
        with_gpus = request.gpus_per_bundle > 0
        for free in (False, True):
            if plan(request, nodes, free=free) is None:
                yield _finding("", "resources", f"{key}: {insufficient(request, nodes, free=free)}")
                break
