"""A policy and an engine over their workers: the calls that go to all of them, such as those of refits and checkpoints.

`rl_backends_base` has the calls with rows, which are sharded over the workers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import CheckpointError, WeightSyncError, WorkerError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, ValueInterface, WeightSample
from rl_core.interfaces.worker import GenerationFacts, PolicyFacts
from rl_core.weights.cuda_ipc import merge_handles
from rl_core.weights.fingerprint import same_digests_on_every_replica


class PolicyFacade(WorkerFacade[PolicyFacts], ColocatablePolicyInterface, ValueInterface):
    """A group of `PolicyWorker`s as one policy or, with `head: scalar`, as one value model; without the calls with rows."""

    config: PolicyConfig

    @property
    def data_ranks(self) -> int:
        """Number of ranks along the data axis."""
        return self.group.sharding.get_axis_size("data") if "data" in self.group.sharding.names else 1

    def set_lr_factor(self, factor: float) -> None:
        self._run("set_lr_factor", factor)

    def average_weights(self, decay: float | None = None) -> None:
        self._run("average_weights", decay)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self._run("prepare_for_training")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        self._run("finish_training")

    def save_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None, **kwargs: Any) -> None:
        paths = _absolute(weights_path), _absolute(optimizer_path)
        self._run("save_checkpoint", *paths, deadline_s=self._deadlines.checkpoint_s)

    def try_save(self, weights_path: str | Path) -> None:
        self._run("try_save", _absolute(weights_path), deadline_s=self._deadlines.checkpoint_s)

    def find_non_finite(self) -> str | None:
        names = self._run_all("find_non_finite", deadline_s=self._deadlines.checkpoint_s)
        return next((f"{name} (rank {rank})" for rank, name in enumerate(names) if name is not None), None)

    def weight_samples(self, *, whole: bool = False) -> list[WeightSample]:
        if whole and self.group.world_size == 1:
            return []  # nothing to compare with
        samples = self._run_all("weight_sample", whole=whole, deadline_s=self._deadlines.checkpoint_s)
        return [sample for sample in samples if sample is not None]

    def checkpoint_bytes(self, *, optimizer: bool) -> int:
        whole = int(self.facts.get("num_parameters", 0))
        trained = int(self.facts.get("num_trained_parameters", whole))
        # Adapters are float32 for a base of any type, and the base is not saved.
        width = 2 if self.config.dtype_name == "bfloat16" and trained == whole else 4
        names = {self.config.optimizer.name, *(group.name for group in self.config.optimizer.groups.values() if group.name)}
        moments = 2 if all(name.rpartition(".")[2].startswith("Adam") for name in names) else 0
        float32_copies = 1 if width == 2 else 0
        return trained * (width + (4 * (moments + float32_copies) if optimizer else 0))

    def load_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None, **kwargs: Any) -> None:
        paths = _absolute(weights_path), _absolute(optimizer_path)
        try:
            self._run("load_checkpoint", *paths, deadline_s=self._deadlines.checkpoint_s)
        except WorkerError as error:
            if isinstance(error.__cause__, CheckpointError):
                raise CheckpointError(str(error.__cause__)) from error
            raise

    @property
    def weight_version(self) -> int:
        self.wait_ready()
        return int(self.group.run_one("get_weight_version", deadline_s=self._deadlines.refit_s))

    def offload_before_refit(self) -> None:
        self._run("offload_before_refit")

    def offload_after_refit(self) -> None:
        self._run("offload_after_refit")

    def prepare_refit_info(self) -> dict[str, Any] | None:
        manifest: dict[str, Any] | None = self._run("prepare_refit_info")
        return manifest

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        return list(self._run("prepare_weights_for_ipc", *args, **kwargs))

    def get_weights_ipc_handles(
        self, keys: list[str], *, by_reference: bool = False, file: str | None = None
    ) -> dict[str, Any]:
        return merge_handles(self._run_all("get_weights_ipc_handles", keys, by_reference=by_reference, file=file))

    def broadcast_weights_for_collective(self) -> list[Any]:
        self.wait_ready()
        return [self.group.submit_all("broadcast_weights_for_collective")]

    def weight_fingerprint(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> str:
        return str(self._run("weight_fingerprint", dtypes=dtypes, kind=kind))

    def weight_digests(self, *, dtypes: Mapping[str, str] | None = None, kind: str | None = None) -> dict[str, str]:
        return dict(self._run("weight_digests", dtypes=dtypes, kind=kind))

    def finish_refit(self) -> None:
        self._run("finish_refit")

    def _run(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call every rank, because gathering weights is collective; returns rank 0's result."""
        return self._run_all(method, *args, deadline_s=deadline_s, **kwargs)[0]

    def _run_all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        self.wait_ready()
        return self.group.run_all(method, *args, deadline_s=deadline_s or self._deadlines.refit_s, **kwargs)


def _absolute(path: str | Path | None) -> Path | None:
    """The path as it is understood by workers, whose working directory may be another one."""
    return None if path is None else Path(path).absolute()


def equal_answer(answers: Sequence[Any], method: str) -> Any:
    """The answer of all replicas, which must be equal.

    Raises:
        WeightSyncError: the replicas differ.
    """
    if any(answer != answers[0] for answer in answers):
        raise WeightSyncError(
            f"The {len(answers)} generation replicas have different weights ({method} differs): a refit failed. Resume the run."
        )
    return answers[0]


class ReplicaRefits(GenerationInterface):
    """Refits replicas together; they must agree on digests and versions."""

    @abstractmethod
    def _run(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every replica of the refit and wait."""

    def prepare_refit_info(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        dtypes: Mapping[str, str] = equal_answer(self._run("prepare_refit_info", info), "prepare_refit_info")
        return dtypes

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        self._run("update_weights", ipc_handles)

    def weight_fingerprint(self) -> str:
        fingerprints: list[str] = self._run("weight_fingerprint")
        if len(set(fingerprints)) > 1:
            self.weight_digests()  # names the tensors
        return fingerprints[0]

    def weight_digests(self) -> dict[str, str]:
        return same_digests_on_every_replica(self._run("weight_digests"))

    def invalidate_kv_cache(self) -> bool:
        return all(self._run("invalidate_kv_cache"))


class GenerationFacade(WorkerFacade[GenerationFacts], ReplicaRefits):
    """A group of `GenerationWorker`s as one engine, without the calls with rows; a worker is a replica."""

    default_name: ClassVar[str] = "generation"
    config: GenerationConfig

    @property
    def has_own_weights(self) -> bool:
        return bool(self.config.has_own_weights)

    @property
    def num_workers(self) -> int:
        return self.group.world_size

    @property
    def weight_version(self) -> int:
        """Version of the weights of all replicas; -1 if one was restarted and not refitted since.

        Raises:
            WeightSyncError: the replicas have different versions.
        """
        versions = self._run("get_weight_version")
        if any(version < 0 and self.lacks_weights(rank) for rank, version in enumerate(versions)):
            return -1
        return int(equal_answer(versions, "get_weight_version"))

    def lacks_weights(self, rank: int) -> bool:
        """Whether a replica was restarted and must not sample before `await_weights`."""
        return False

    def update_weights_from_collective(self) -> list[Any]:
        self.wait_ready()
        return [self.group.submit_all("update_weights_from_collective")]

    def _run(self, method: str, *args: Any) -> list[Any]:
        self.wait_ready()
        return self.group.run_all(method, *args, deadline_s=self._deadlines.refit_s)
