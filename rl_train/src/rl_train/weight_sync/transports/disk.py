"""Weights through files, for an engine that shares neither a node nor a process group with the policy.

Two buckets are on disk at a time. A file is closed before the engine gets its name, so a network file system with close-to-open
consistency is sufficient. The folder is removed after the refit; if the driver was killed, by the next refit with the same
parent folder.
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import ClassVar

import psutil

from rl_core.errors import DeadlineExceededError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport

_PREFIX = "rlcore-refit"


class DiskTransport(WeightTransport):
    """Policy and generation backend on any nodes with a shared folder (`policy.generation.refit_folder`)."""

    name: ClassVar[str] = "disk"

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        deadline = time.monotonic() + self.context.deadline_s
        buckets = policy.prepare_weights_for_ipc(self.context.buffer_bytes // 2, receiver_dtypes=self.context.receiver_dtypes())
        moved = 0
        loading: Future[None] | None = None
        with _own_folder(self.context.folder) as folder, ThreadPoolExecutor(max_workers=1) as reader:
            for number, keys in enumerate(buckets):
                path = folder / f"{number}.safetensors"
                handles = policy.get_weights_ipc_handles(keys, file=str(path))
                self._finish(loading, deadline, number, len(buckets))
                (folder / f"{number - 1}.safetensors").unlink(missing_ok=True)
                loading = reader.submit(generation.update_weights, handles)
                moved += int(handles["num_bytes"])
            self._finish(loading, deadline, len(buckets), len(buckets))
        return moved

    def _finish(self, loading: Future[None] | None, deadline: float, number: int, count: int) -> None:
        if loading is None:
            return
        wait([loading], timeout=max(deadline - time.monotonic(), 0.0))
        if not loading.done():
            raise DeadlineExceededError(
                f"The refit by disk has taken {self.context.deadline_s:g} s, and the generation backend has not loaded file "
                f"{number} of {count} in {self.context.folder}. Use a faster folder (policy.generation.refit_folder), or "
                "raise cluster.deadlines.refit_s."
            )
        loading.result()


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
