"""Asks a process on every node of the cluster, started as a run starts its workers. A node that does not answer is named."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.cluster.deadlines import Deadlines
from rl_core.cluster.pending_call import PendingCall
from rl_core.cluster.placement import Node
from rl_core.cluster.ray_runtime import RayLease, live_nodes
from rl_core.cluster.remote_actor import ActorCall, RemoteActor, pack_worker
from rl_core.errors import RLCoreError
from rl_core.interfaces.worker_context import WorkerContext
from rlcore_cli.cluster_check.node_probe import NodeProbe, NodeReport, report
from rlcore_cli.cluster_check.questions import Questions

_STACK_S = 5.0
_CONNECT_S = 10.0
_PREFIX = ".rlcore-doctor-"
_MIB_SENT = 8


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the nodes answered, by name of the node: its address, and its id if several have the same.

    Attributes:
        here: The report of this process.
        nodes: The nodes, that of this process first.
        reports: An error for a node that did not answer.
        skews: Seconds by which the clock of a node is surely ahead or behind.
        shared: Problem of a node with a folder that the run writes to, by key and node.
        mib_per_s: By sending and receiving node; a text says why it failed.
    """

    here: NodeReport
    nodes: dict[str, Node]
    reports: dict[str, NodeReport | RLCoreError] = field(default_factory=dict)
    skews: dict[str, float] = field(default_factory=dict)
    shared: dict[str, dict[str, str]] = field(default_factory=dict)
    mib_per_s: dict[tuple[str, str], float | str] = field(default_factory=dict)


def survey_nodes(questions: Questions, *, timeout_s: float) -> Survey:
    """Asks every node; each call waits up to `timeout_s`."""
    inputs = list(questions.inputs.values())
    with ExitStack() as exits:
        lease = RayLease()
        exits.callback(lease.release)
        nodes = _named(live_nodes())
        probes = _Probes(nodes, timeout_s)
        exits.callback(probes.kill)
        sent = time.time()
        reports = probes.call("report", dict.fromkeys(probes.nodes, (inputs,)))
        received = time.time()
        answered = {node: answer for node, answer in reports.items() if isinstance(answer, NodeReport)}
        probes.keep(answered)
        return Survey(
            here=report(inputs),
            nodes=nodes,
            reports=reports,
            skews={node: _outside(answer.clock, sent, received) for node, answer in answered.items()},
            shared={folder: _sharing(probes, folder) for folder in questions.outputs.values()},
            mib_per_s=_speeds(probes, {node: (nodes[node].address, answer.port) for node, answer in answered.items()}),
        )


class _Probes:
    """One process on each node, started as the workers of a run are."""

    def __init__(self, nodes: Mapping[str, Node], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        packed = pack_worker(NodeProbe, {})
        self._failed: dict[str, RLCoreError] = {}
        self._actors = {
            name: RemoteActor(
                f"the check of node {name}",
                options={"label_selector": {"ray.io/node-id": node.node_id}},
                env={"CUDA_VISIBLE_DEVICES": ""},
                runtime_env={},
            )
            for name, node in nodes.items()
        }
        first = next(iter(nodes.values())).address
        contexts = [
            WorkerContext(rank=rank, world_size=len(nodes), local_rank=0, node_rank=rank, master_address=first, master_port=0)
            for rank in range(len(nodes))
        ]
        pairs = zip(self._actors.items(), contexts, strict=True)
        built = self._wait({name: actor.build(packed, context, {}) for (name, actor), context in pairs})
        self._failed = {name: answer for name, answer in built.items() if isinstance(answer, RLCoreError)}

    @property
    def nodes(self) -> list[str]:
        """The nodes whose process has started and answers."""
        return [name for name in self._actors if name not in self._failed]

    def keep(self, answered: Mapping[str, Any]) -> None:
        """Ask only these nodes from now on."""
        self._failed |= {name: RLCoreError("no answer") for name in self.nodes if name not in answered}

    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """The answer of each node, or the error; also of those whose process did not start."""
        calls = {name: self._actors[name].call(method, (args, {})) for name, args in arguments.items()}
        return {**self._failed, **self._wait(calls)}

    def kill(self) -> None:
        """End the processes."""
        for actor in self._actors.values():
            actor.kill()

    def _wait(self, calls: Mapping[str, ActorCall]) -> dict[str, Any]:
        until, answers = time.monotonic() + self.timeout_s, {}
        for name, call in calls.items():
            pending = PendingCall([call], deadline_s=self.timeout_s, deadlines=Deadlines(stack_s=_STACK_S))
            try:
                answers[name] = pending.result(max(until - time.monotonic(), 0.1))[0]
            except RLCoreError as error:
                answers[name] = error
        return answers


def _named(nodes: Sequence[Node]) -> dict[str, Node]:
    addresses = [node.address for node in nodes]
    return {n.address if addresses.count(n.address) == 1 else f"{n.address} ({n.node_id[:8]})": n for n in nodes}


def _sharing(probes: _Probes, folder: str) -> dict[str, str]:
    """The problem of each node with a folder that all must see; files are written to it and removed."""
    parent = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
    token = f"{_PREFIX}{uuid.uuid4().hex}"
    file_names = {node: f"{token}-{rank}" for rank, node in enumerate(probes.nodes)}
    written = parent / token
    try:
        written.write_bytes(b"")
    except OSError as error:
        return {"driver": f"cannot write to {parent} ({error.strerror})"}
    try:
        answers = probes.call("share", {node: (str(parent), token, name) for node, name in file_names.items()})
        problems = {node: str(answers[node]) for node in file_names if answers[node] is not None}
        for node in file_names.keys() - problems:
            if not (parent / file_names[node]).exists():
                problems[node] = f"writes to another folder {parent} than the driver"
        probes.call("remove", {node: (str(parent), name) for node, name in file_names.items()})
    finally:
        written.unlink()
    return problems


def _speeds(probes: _Probes, ports: Mapping[str, tuple[str, int]]) -> dict[tuple[str, str], float | str]:
    """MiB/s from each node to each other one. In a round, each node sends to one node and receives from one."""
    speeds: dict[tuple[str, str], float | str] = {}
    nodes = list(ports)
    for distance in range(1, len(nodes)):
        peers = {node: nodes[(rank + distance) % len(nodes)] for rank, node in enumerate(nodes)}
        wait_s = min(_CONNECT_S, probes.timeout_s / 3)
        answers = probes.call("exchange", {n: (ports[n][1], ports[p], _MIB_SENT, wait_s) for n, p in peers.items()})
        for node, peer in peers.items():
            answer = answers[node]
            speeds[node, peer] = str(answer).partition("\n")[0] if isinstance(answer, RLCoreError) else answer
    return speeds


def _outside(clock: float, sent: float, received: float) -> float:
    """Seconds by which a clock is before or after an interval in which it was read."""
    return min(clock - sent, 0.0) + max(clock - received, 0.0)
