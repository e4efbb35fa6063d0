"""Base of the facades over workers; decides whether workers run in this process or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.sharding import NamedSharding
from rl_core.cluster.worker_group import Deadlines, WorkerGroup
from rl_core.config.schema import DeadlineConfig, GenerationConfig, PolicyConfig
from rl_core.errors import ConfigError
from rl_core.interfaces.private_names import PrivateNames

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


FactsT = TypeVar("FactsT", bound=Mapping[str, Any])


class WorkerFacade(PrivateNames, Generic[FactsT]):
    """Common part of all facades over workers: the group, the facts it reports and its shutdown.

    Loading starts in the constructor and is awaited at the first use, so that several groups load at the same time.

    Args:
        worker_class: the backend's worker, which takes (`context`, `config`); by default, the class attribute of this name.
        config: its section, passed to each worker.
        name: name of the group in errors; `default_name` by default.
        cluster: where the workers run; without one, a single worker runs in this process.
        num_workers: number of ranks; that of the section, or all of the cluster's, by default.
        deadlines: timeouts by kind of call.
        sharding: the named grid of ranks; all of them along `data` by default.
        env_vars: additional environment variables of the workers.
        bundles_per_worker: number of cluster bundles per worker, for an engine with its own processes.
    """

    default_name: ClassVar[str] = "policy"
    worker_class: type

    def __init__(
        self,
        *,
        worker_class: type | None = None,
        config: PolicyConfig | GenerationConfig,
        name: str = "",
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        sharding: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        bundles_per_worker: int = 1,
    ) -> None:
        self.config = config
        self.worker_class = worker_class or self.worker_class
        self._name = name or self.default_name
        self._deadlines = deadlines or DeadlineConfig()
        of_section = config.num_workers if isinstance(config, GenerationConfig) else None
        self._num_workers, self._sharding = num_workers or of_section, sharding
        self._env_vars, self._bundles_per_worker = env_vars, bundles_per_worker
        self.group: WorkerGroup = self._make_group(cluster)
        self._setup = self.group.submit_all("setup")
        self._facts: list[FactsT] | None = None
        self._closed = False

    @property
    def is_in_process(self) -> bool:
        """Whether a single worker runs in this process."""
        return isinstance(self.group, InProcessWorkerGroup)

    def move_to_cluster(self, cluster: RayVirtualCluster) -> None:
        """Move to a cluster; for a facade that was created without one and has only loaded what its config names."""
        self.group.shutdown()
        self.group = self._make_group(cluster)
        self._setup, self._facts = self.group.submit_all("setup"), None

    @property
    def facts(self) -> FactsT:
        """What rank 0 reported when it had loaded."""
        return self.wait_ready()[0]

    def wait_ready(self) -> list[FactsT]:
        """Wait until every rank has loaded; returns what each reported.

        Raises:
            WorkerError: a rank could not load.
            DeadlineExceededError: a rank took longer than `start_s`.
        """
        if self._facts is None:
            self._facts = self._setup.result(self._deadlines.start_s)
        return self._facts

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Let all workers join the weight collective; see `ColocatablePolicyInterface` and `GenerationInterface`."""
        self.wait_ready()
        return [self.group.submit_all("init_collective", ip, port, world_size)]

    def shutdown(self) -> bool:
        """Stop the workers and their processes; calling it twice is fine. Returns True."""
        if not self._closed:
            self._closed = True
            self.group.shutdown()
        return True

    def _make_group(self, cluster: RayVirtualCluster | None) -> WorkerGroup:
        """Start the workers.

        Raises:
            ConfigError: a single process cannot have more than one rank or a separate interpreter.
        """
        python, worker_kwargs = self.config.python, {"config": self.config}
        if cluster is None:
            ranks = self._num_workers or 1
            if ranks > 1 or python is not None:
                raise ConfigError(
                    f"The {self._name} needs {ranks} workers{' and its own interpreter' if python else ''}, but runs in this "
                    "process. Set `cluster.backend: ray`, or pass `cluster=RayVirtualCluster([...])` in Python."
                )
            return InProcessWorkerGroup(
                self.worker_class, worker_kwargs=worker_kwargs, sharding=self._sharding, name=self._name, device=local_device()
            )
        from rl_core.cluster.ray_worker_group import RayWorkerGroup

        return RayWorkerGroup(
            cluster,
            self.worker_class,
            worker_kwargs=worker_kwargs,
            sharding=self._sharding,
            num_workers=self._num_workers,
            name=self._name,
            python=python,
            env_vars=self._env_vars,
            bundles_per_worker=self._bundles_per_worker,
            deadlines=Deadlines(start_s=self._deadlines.start_s),
        )


def local_device() -> Literal["cpu", "cuda"]:
    """The device of a single worker in this process: the first visible GPU, if any."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
