"""What `rlcore doctor --cluster` asks every node of the cluster, and how.

`questions_of` takes from a config the paths that nodes read, the folders that a run writes, and its workers. `survey_nodes`
starts a `NodeProbe` on every node, as a run starts its workers, which reports versions, plugins and files and connects to the
other nodes. A node that does not answer is named.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.cluster.placement import Node
from rl_core.cluster.ray_runtime import RayLease, live_nodes
from rl_core.cluster.remote_actor import ActorCall, RemoteActor, pack_worker
from rl_core.cluster.worker_group import Deadlines, PendingCall
from rl_core.config.diagnostics import dotted
from rl_core.config.section import PathRule
from rl_core.errors import RLCoreError
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.rendezvous.interfaces import free_port

if TYPE_CHECKING:
    from rl_core.config.section import ResourcesConfig
    from rl_train.config.loader import LoadedConfig
    from rl_train.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What to check on every node.

    Attributes:
        inputs: Existing files and folders that the config names, by key.
        outputs: Folders that a run writes to, by key.
        workers: Workers of the run, by section; the first are those of the policy.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=lambda: {"logger.log_dir": os.path.abspath("runs")})
    workers: Mapping[str, ResourcesConfig] = field(default_factory=dict)


def questions_of(config: Path | None, overrides: list[str]) -> Questions:
    """What to check for a config with overrides; without a config, the default run folder only."""
    if config is None:
        return Questions()
    from rl_train.config.loader import load_config

    loaded = load_config([config], overrides)
    run = loaded.run
    outputs = {"logger.log_dir": run.logger.log_dir}
    if run.checkpointing.enabled and run.checkpointing.checkpoint_dir is not None:
        outputs["checkpointing.checkpoint_dir"] = run.checkpointing.checkpoint_dir
    return Questions(
        inputs=_inputs(loaded),
        outputs={key: os.path.abspath(os.path.expanduser(path)) for key, path in outputs.items()},
        workers=_workers(run),
    )


def _inputs(loaded: LoadedConfig) -> dict[str, str]:
    paths = {}
    for field_ in loaded.layout.fields():
        if any(isinstance(item, PathRule) for item in field_.info.metadata):
            value = _value(loaded.resolved, field_.path)
            if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
                paths[dotted(field_.path)] = value
    return paths


def _value(values: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _workers(run: RunConfig) -> dict[str, ResourcesConfig]:
    sections: dict[str, ResourcesConfig] = {"cluster": run.cluster}
    if run.policy.generation is not None and run.policy.generation.resources is not None:
        sections["policy.generation.resources"] = run.policy.generation.resources
    return sections


_STACK_S = 5.0
_CONNECT_S = 10.0
_PREFIX = ".rlcore-doctor-"
_MIB = 2**20
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
            # 0 for a clock that was read between the two times.
            skews={
                node: min(answer.clock - sent, 0.0) + max(answer.clock - received, 0.0) for node, answer in answered.items()
            },
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


class NodeProbe:
    """Runs on each node as the workers of a run do."""

    def report(self, inputs: Sequence[str]) -> NodeReport:
        """The report of this node."""
        return report(inputs)

    def share(self, folder: str, written: str, own: str) -> str | None:
        """Reads the file `written` and writes `own` in a folder; returns the problem if that fails."""
        try:
            Path(folder, written).read_bytes()
        except OSError as error:
            return f"does not see what the driver writes there ({error.strerror})"
        try:
            Path(folder, own).write_bytes(b"")
        except OSError as error:
            return f"cannot write there ({error.strerror})"
        return None

    def remove(self, folder: str, own: str) -> None:
        """Removes the file that `share` wrote."""
        Path(folder, own).unlink(missing_ok=True)

    def exchange(self, port: int, peer: tuple[str, int], mib: int, timeout_s: float) -> float | str:
        """Sends data to a peer while another node sends to `port`; MiB/s, or what failed."""
        problems: list[str] = []
        receiver = threading.Thread(target=_receive, args=(port, mib, timeout_s, problems), daemon=True)
        receiver.start()
        sent = send(peer, mib, timeout_s)
        receiver.join(timeout_s)
        return f"cannot listen on port {port}: {problems[0]}" if problems else sent


def send(peer: tuple[str, int], mib: int, timeout_s: float) -> float | str:
    """Sends data to a peer that listens, or will soon; MiB/s until the peer has all of it, or what failed."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            with closing(socket.create_connection(peer, max(until - time.monotonic(), 0.1))) as connection:
                started = time.perf_counter()
                for _ in range(mib):
                    connection.sendall(bytes(_MIB))
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1) != b"k":
                    return "the connection was closed"
                return mib / (time.perf_counter() - started)
        except ConnectionRefusedError as error:
            # The peer's task may not have started yet.
            if time.monotonic() >= until:
                return str(error)
            time.sleep(0.05)
        except OSError as error:
            return str(error) or type(error).__name__


def _receive(port: int, mib: int, timeout_s: float, problems: list[str]) -> None:
    try:
        with socket.create_server(("", port)) as server:
            server.settimeout(timeout_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return  # the sender reports it
            with closing(connection):
                connection.settimeout(timeout_s)
                left = mib * _MIB
                while left > 0 and (size := len(connection.recv(_MIB))):
                    left -= size
                connection.sendall(b"k")
    except OSError as error:
        problems.append(str(error))


LIBRARIES = ("ray", "torch", "transformers", "safetensors", "numpy", "vllm", "megatron-core")


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a process on a node has and sees.

    Attributes:
        host: Name of the machine.
        python: Version of the interpreter.
        versions: Installed version of each library and of each distribution with plugins.
        plugins: Status of each plugin, such as `ready`.
        inputs: Digest of each file or folder of the config; None if it does not exist.
        port: A port that is free, as for a rendezvous.
        clock: Seconds since the epoch.
    """

    host: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str | None] = field(default_factory=dict)
    port: int = 0
    clock: float = 0.0


def report(inputs: Sequence[str] = ()) -> NodeReport:
    """The report of this process; `inputs` are paths."""
    from rl_core.plugins.manager import discover

    plugins = discover(strict=False).plugins
    installed = {plugin.distribution: plugin.version for plugin in plugins if plugin.version}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NodeReport(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions=installed,
        plugins={plugin.name: plugin.status.value for plugin in plugins},
        inputs={path: digest(Path(path)) for path in inputs},
        port=free_port(),
        clock=time.time(),
    )


def digest(path: Path) -> str | None:
    """Digest of names, sizes, and the first and last MiB of each file; None if the path does not exist."""
    if not path.exists():
        return None
    total = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        total.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as content:
            total.update(content.read(_MIB))
            content.seek(max(size - _MIB, 0))
            total.update(content.read(_MIB))
    return total.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        yield from (file for name in sorted(names) if (file := Path(folder, name)).is_file())
