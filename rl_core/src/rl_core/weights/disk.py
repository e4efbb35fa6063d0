"""Files of weights, as one side of a refit writes them and the other reads them, and checks that they are finite."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from socket import gethostname

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rl_core.errors import WeightSyncError

_CHUNK_BYTES = 2**22


def write_tensors(path: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one bucket as a safetensors file.

    Raises:
        WeightSyncError: it cannot be written.
    """
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors}, path)
    except OSError as error:
        raise WeightSyncError(
            f"The policy cannot write {path} ({error}). policy.generation.refit_folder must be on a disk that policy and "
            "generation backend can both access."
        ) from error


def read_tensors(path: str, device: torch.device) -> Mapping[str, torch.Tensor]:
    """The tensors of one file.

    Raises:
        WeightSyncError: it cannot be read.
    """
    try:
        tensors: Mapping[str, torch.Tensor] = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"The generation backend cannot read {path} on {gethostname()} ({error}). policy.generation.refit_folder must be "
            "on a disk that policy and generation backend can both access."
        ) from error
    return tensors


def resolve_below(folder: Path, name: str) -> Path:
    """The weights file with this relative path, for a server that loads files named by its clients.

    Args:
        folder: an absolute path without symbolic links.
        name: path below it.

    Raises:
        WeightSyncError: the path is absolute, contains `..` or a symbolic link, or is not a safetensors file.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name or relative.suffix != ".safetensors":
        raise WeightSyncError(f"{name!r} is not the relative path of a .safetensors file without `..`.")
    path, mode = folder, 0
    for part in relative.parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise WeightSyncError(f"{name} cannot be read on the server: {error.strerror}.") from error
        if stat.S_ISLNK(mode):
            raise WeightSyncError(f"{name}: symbolic links are not allowed.")
    if not stat.S_ISREG(mode):
        raise WeightSyncError(f"{name} is not a file.")
    return path


def file_digest(path: Path) -> str:
    """XXH3-128 of a file's bytes.

    Raises:
        WeightSyncError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise WeightSyncError(f"{path} cannot be read: {error.strerror}.") from error
    return str(digest.hexdigest())


def first_non_finite(tensors: Iterable[tuple[str, torch.Tensor]], *, published: torch.dtype | None = None) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None; reads each tensor once.

    Args:
        tensors: name and tensor; for a sharded tensor, this rank's shard is read.
        published: the dtype to which the tensors will be rounded, which can turn finite numbers into infinite ones.
    """
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0 or not local.is_floating_point():
            continue
        extremes = torch.stack(torch.aminmax(local.detach()))  # a NaN anywhere makes both NaN
        if published is not None:
            extremes = extremes.to(published)
        if not all(math.isfinite(value) for value in extremes.tolist()):
            return name
    return None


def refuse_non_finite_file(path: Path) -> None:
    """Check a file of weights before an engine loads it.

    Raises:
        WeightSyncError: a tensor has a NaN or an infinity, or the file cannot be read.
    """
    name = first_non_finite(read_tensors(str(path), torch.device("cpu")).items())
    if name is not None:
        raise WeightSyncError(
            f"Weights are rejected: {name} has values that are NaN or infinite. The policy has diverged: continue from an "
            "earlier checkpoint with a lower learning rate."
        )
