"""Weights through files, for an engine that shares neither a node nor a process group with the policy.

Two buckets are on disk at a time. A file is closed before the engine gets its name, so a network file system with close-to-open
consistency is sufficient. The folder is removed after the refit; if the driver was killed, by the next refit with the same
parent folder.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import Any, ClassVar

import psutil

from rl_core.errors import WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport
from rl_train.weight_sync.transports.bucket_pipeline import push_buckets

_PREFIX = "rlcore-refit"


class DiskTransport(WeightTransport):
    """Policy and generation backend on any nodes with a shared folder (`policy.generation.refit_folder`)."""

    name: ClassVar[str] = "disk"
    requires: ClassVar[tuple[str, ...]] = ("disk",)

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        with _own_folder(self.context.folder) as folder:

            def write(number: int, names: list[str]) -> dict[str, Any]:
                (folder / f"{number - 2}.safetensors").unlink(missing_ok=True)
                return policy.get_weights_ipc_handles(names, file=str(folder / f"{number}.safetensors"))

            return push_buckets(self.context, policy, generation, write, overdue=self._overdue)

    def _overdue(self, file: str) -> str:
        return (
            f"The refit by disk has taken {self.context.deadline_s:g} s, and the generation backend has not loaded file "
            f"{file} in {self.context.folder}. Use a faster folder (policy.generation.refit_folder), or "
            "raise cluster.deadlines.refit_s."
        )


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder for one refit."""
    _sweep(parent)
    folder = parent / f"{_PREFIX}-{gethostname()}-{getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightSyncError(
            f"Cannot create a folder for weights in {parent} ({error}). Choose another: policy.generation.refit_folder."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders of drivers on this host that no longer run."""
    for folder in parent.glob(f"{glob.escape(f'{_PREFIX}-{gethostname()}')}-*"):
        owner = folder.name.rpartition("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
