"""A group of workers as Ray actors, one per bundle of a virtual cluster."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster import daemons
from rl_core.cluster.actor_host import read_progress
from rl_core.cluster.isolation import runtime_env_of
from rl_core.cluster.remote_actor import ActorCall, RemoteActor, pack_worker, ray_options, wait_exited
from rl_core.cluster.sharding import NamedSharding
from rl_core.cluster.virtual_cluster import Bundle, RayVirtualCluster
from rl_core.cluster.worker_group import Arguments, Deadlines, Leading, PendingCall, WorkerGroup
from rl_core.compute_variables import compute_variables
from rl_core.errors import DeadlineExceededError, ResourceInsufficientError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext

_log = logging.getLogger(__name__)


class RayWorkerGroup(WorkerGroup):
    """One Ray actor per rank, each in a bundle of the cluster; all are built when the constructor returns.

    The class is a plain class. If the first parameter of its constructor is named `context` (or annotated as
    `WorkerContext`), it gets its `WorkerContext`; any other class is built from `worker_kwargs` alone, so that
    `RayWorkerGroup(cluster, policy_class)` works with classes without ranks. A class wrapped in `@ray.remote` is
    unwrapped. Methods run on the main thread of their process, one at a time.

    Each process starts with RANK, WORLD_SIZE, LOCAL_RANK, NODE_RANK, OMP_NUM_THREADS, OMP_WAIT_POLICY and
    GOMP_SPINCOUNT in its environment, and has MASTER_ADDR and MASTER_PORT before the class is imported.

    Args:
        cluster: Cluster that the workers run on.
        worker_class: Imported in the worker's process, so it must be importable there (or defined in `__main__`).
        worker_kwargs: Constructor arguments, stored once for all ranks.
        sharding: The grid; `data` over all workers by default.
        num_workers: Number of workers, in the first bundles; one per bundle by default.
        name: Name of the group in errors and logs.
        env_vars: Additional environment variables; they override those above.
        python: Interpreter of the workers, if not the driver's.
        deadlines: Deadlines of starting, calling and stopping.
        bundles_per_worker: Bundles of a worker, on one node; its process sees the GPUs of all of them.

    Raises:
        ResourceInsufficientError: More workers than bundles, or more groups than may share the cluster.
        WorkerError: A constructor raised.
        DeadlineExceededError: A worker was not built within `deadlines.start_s`.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        worker_class: type,
        *,
        worker_kwargs: Mapping[str, Any] | None = None,
        sharding: NamedSharding | None = None,
        num_workers: int | None = None,
        name: str = "",
        env_vars: Mapping[str, str] | None = None,
        python: str | Path | None = None,
        deadlines: Deadlines | None = None,
        bundles_per_worker: int = 1,
    ) -> None:
        self._cluster = cluster
        self.sharding = _grid(cluster.world_size() // bundles_per_worker, sharding, num_workers)
        self._allocator = BundleAllocator(cluster, per_worker=bundles_per_worker, num_workers=self.sharding.size)
        self._class = worker_class
        self._name = name or getattr(worker_class, "__name__", None) or type(worker_class).__name__
        self._deadlines = deadlines or Deadlines()
        self._env_vars = dict(env_vars or {})
        self._runtime_env = runtime_env_of(python)
        self._actors: list[RemoteActor] = []
        self._contexts: dict[int, WorkerContext] = {}
        self._sampling: list[str] = []  # IDs of the tasks of the latest `generate` call
        cluster.attach(self, self._name)
        try:
            self._packed = pack_worker(worker_class, worker_kwargs or {})
            self._actors = [self._start(rank) for rank in range(self.world_size)]
            self._build(dict(enumerate(self._actors)))
        except BaseException:
            self._end()
            raise

    def pids(self) -> list[int]:
        """The process id of each rank, on its host."""
        return [actor.identity.pid for actor in self._actors if actor.identity is not None]

    def describe_rank(self, rank: int) -> str:
        return f"{self._actors[rank].label}, {self._actors[rank].where()}"

    def batch_progress(self) -> tuple[int, int] | None:
        return read_progress(self._sampling)

    def workers_alive(self) -> list[bool]:
        return [actor.is_alive() for actor in self._actors]

    def restart(self, rank: int | None = None) -> None:
        ranks = range(self.world_size) if rank is None else [rank]
        for one in ranks:
            self.sharding.get_worker_coords(one)
            self._actors[one].kill()
        wait_exited([self._actors[one] for one in ranks])
        if rank is None:
            self._contexts = {}  # a new rendezvous: the old port may still be held by a dying peer
        # Until they are built, calls of other threads meet the workers that exited, and not ones without an instance.
        actors = {one: self._start(one) for one in ranks}
        try:
            self._build(actors)
        except BaseException:
            for actor in actors.values():
                actor.kill()
            raise
        self._actors = [actors.get(one, actor) for one, actor in enumerate(self._actors)]

    def check_others(self) -> None:
        for group in self._cluster.tenants:
            for rank, is_alive in enumerate(group.workers_alive()):
                if group is not self and not is_alive:
                    raise WorkerDiedError(f"{group.describe_rank(rank)}, has died. Run the same command again to resume.")

    def shutdown(self) -> None:
        if not self._actors:
            return
        try:
            alive = [] if daemons.is_dead() else [actor for actor in self._actors if actor.is_alive()]
            closes = [actor.close() for actor in alive]
            PendingCall(closes, deadline_s=self._deadlines.stop_s, deadlines=self._deadlines).result()
        except (WorkerError, DeadlineExceededError) as error:
            # The work is done and its results are safe: log the failure and stop the processes anyway.
            _log.warning("'%s' did not shut down by itself: %s", self._name, error)
        finally:
            self._end()

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        self._cluster.detach(self)
        if not ray.is_initialized():
            return
        for actor in actors:
            actor.kill()
        wait_exited(actors)
        self._allocator.release()

    def _start(self, rank: int) -> RemoteActor:
        """Request the process of one rank from Ray."""
        bundle = self._allocator.own_bundle(rank)
        coords = ", ".join(f"{axis}={at}" for axis, at in self.sharding.get_worker_coords(rank).items())
        share = self._cluster.worker_share()
        env = {
            # Ray makes all GPUs of the node visible to a process without any.
            **({} if share["num_gpus"] else {"CUDA_VISIBLE_DEVICES": ""}),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self._local_rank(rank)),
            "NODE_RANK": str(bundle.node_rank),
            "OMP_NUM_THREADS": str(self._threads(rank)),
            **compute_variables(),
            **self._env_vars,
        }
        return RemoteActor(
            f"rank {rank} ({coords}) of '{self._name}'",
            group=self._name,
            options={**ray_options(self._class), **share, "scheduling_strategy": scheduling_strategy(bundle)},
            env=env,
            runtime_env=self._runtime_env,
        )

    def _build(self, actors: Mapping[int, RemoteActor]) -> None:
        """Wait for the processes, take the rendezvous address of rank 0 if there is none yet, and build the workers."""
        share, name, allocator = self._cluster.worker_share(), self._name, self._allocator
        holding = [
            call for rank in actors for call in allocator.reserve(rank, share=share, runtime_env=self._runtime_env, name=name)
        ]
        self._await_start([*(actor.started() for actor in actors.values()), *holding])
        if not self._contexts:
            identity = actors[0].identity
            assert identity is not None
            self._contexts = {rank: self._context(rank, identity.address, identity.port) for rank in range(self.world_size)}
        env = {
            "MASTER_ADDR": self._contexts[0].master_address,
            "MASTER_PORT": str(self._contexts[0].master_port),
            **self._env_vars,
        }
        builds = [
            actor.build(self._packed, self._contexts[rank], env | self._allocator.visible_gpus(rank, actor))
            for rank, actor in actors.items()
        ]
        self._await_start(builds)

    def _context(self, rank: int, address: str, port: int) -> WorkerContext:
        return WorkerContext(
            rank=rank,
            world_size=self.world_size,
            local_rank=self._local_rank(rank),
            node_rank=self._allocator.own_bundle(rank).node_rank,
            master_address=address,
            master_port=port,
            coords=self.sharding.get_worker_coords(rank),
            device="cuda" if self._cluster.use_gpus else "cpu",
            num_threads=self._threads(rank),
            seed=self._cluster.seed,
        )

    def _threads(self, rank: int) -> int:
        return self._cluster.threads_of(self._allocator.own_bundle(rank))

    def _local_rank(self, rank: int) -> int:
        before = Counter(self._allocator.own_bundle(other).node.node_id for other in range(rank))
        return before[self._allocator.own_bundle(rank).node.node_id]

    def _submit(
        self, method: str, leading: Leading, shared: Arguments, *, deadline_s: float | None, kept: Collection[int] | None = None
    ) -> PendingCall:
        for rank in leading:
            self.sharding.get_worker_coords(rank)
        if not self._actors:
            raise UserError(f"group '{self._name}' was shut down; no method can run on it")
        stored_shared, readers = self._store(shared, len(leading)), Counter(map(id, leading.values()))
        stored = {id(items): [self._store(item, readers[id(items)]) for item in items] for items in leading.values()}
        calls = [
            self._actors[rank].call(method, stored_shared, *stored[id(items)], keep_result=kept is None or rank in kept)
            for rank, items in leading.items()
        ]
        if method == "generate":
            self._sampling = [call.ref.task_id().hex() for call in calls]
        deadline_s = self._deadlines.call_s if deadline_s is None else deadline_s
        return PendingCall(calls, deadline_s=deadline_s, deadlines=self._deadlines)

    def _await_start(self, calls: Sequence[ActorCall]) -> None:
        PendingCall(calls, deadline_s=self._deadlines.start_s, deadlines=self._deadlines).result()

    @staticmethod
    def _store(value: Any, readers: int) -> Any:
        """Put a value into Ray's object store if several ranks read it; Ray resolves the reference before the call."""
        return ray.put(value) if readers > 1 else value


def _grid(most: int, sharding: NamedSharding | None, num_workers: int | None) -> NamedSharding:
    count = num_workers or (sharding.size if sharding is not None else most)
    grid = sharding or NamedSharding.grid(data=count)
    if sorted(grid.layout.ravel().tolist()) != list(range(count)):
        raise UserError(
            f"{grid} must contain each of the ranks 0 to {count - 1} once; change num_workers={num_workers} or the sharding"
        )
    return grid


class BundleAllocator:
    """Bundles by rank: rank i has `per_worker` consecutive bundles, starting at `i * per_worker`.

    A worker whose engine runs several processes (tensor-parallel sampling) needs the GPUs of several bundles. Its own process
    runs in the first; in each of the others an idle process reserves the GPU and reports which GPU it is.

    Raises:
        ResourceInsufficientError: there are too few bundles, or those of one rank are on several nodes.
    """

    def __init__(self, cluster: RayVirtualCluster, *, per_worker: int, num_workers: int) -> None:
        self._cluster, self._per_worker = cluster, per_worker
        self._holders: dict[int, list[RemoteActor]] = {}
        if num_workers * per_worker > cluster.world_size():
            each = f" of {per_worker} bundles each" if per_worker > 1 else ""
            raise ResourceInsufficientError(
                f"{num_workers} workers{each} were requested, but {cluster.name} has {cluster.world_size()} bundles. Use a "
                f"larger bundle_ct_per_node_list, or at most {cluster.world_size() // per_worker} workers."
            )
        for rank in range(num_workers):
            nodes = {bundle.node.node_id for bundle in self._all(rank)}
            if len(nodes) > 1:
                raise ResourceInsufficientError(
                    f"The {per_worker} bundles of worker {rank} are on {len(nodes)} nodes, but must be on one. "
                    f"Give every node of {cluster.name} a multiple of {per_worker} bundles."
                )

    def own_bundle(self, rank: int) -> Bundle:
        """The bundle of the rank's own process."""
        return self._all(rank)[0]

    def reserve(self, rank: int, *, share: Mapping[str, float], runtime_env: Mapping[str, Any], name: str) -> list[ActorCall]:
        """Start reserving the rank's other GPUs, if it has any that are not reserved yet."""
        if self._per_worker == 1 or not self._cluster.use_gpus or rank in self._holders:
            return []
        self._holders[rank] = [
            RemoteActor(
                f"GPU {gpu} of rank {rank} of '{name}'",
                options={**share, "scheduling_strategy": scheduling_strategy(bundle)},
                env={},
                runtime_env=runtime_env,
            )
            for gpu, bundle in enumerate(self._all(rank)[1:], 1)
        ]
        return [holder.started() for holder in self._holders[rank]]

    def visible_gpus(self, rank: int, own: RemoteActor) -> dict[str, str]:
        """The environment variable that makes all GPUs of the rank visible; empty if Ray's own value is correct."""
        holders = self._holders.get(rank)
        if not holders:
            return {}
        device_lists = [actor.identity.visible_gpus for actor in (own, *holders) if actor.identity is not None]
        return {"CUDA_VISIBLE_DEVICES": ",".join(device_lists)}

    def release(self) -> None:
        """Stop the processes that reserve GPUs; calling it twice is fine."""
        holders = [holder for several in self._holders.values() for holder in several]
        self._holders = {}
        for holder in holders:
            holder.kill()
        wait_exited(holders)

    def _all(self, rank: int) -> Sequence[Bundle]:
        return self._cluster.bundles[rank * self._per_worker : (rank + 1) * self._per_worker]


def scheduling_strategy(bundle: Bundle) -> PlacementGroupSchedulingStrategy:
    """The scheduling strategy that places a process in a bundle."""
    return PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.index)
