"""Files of weights, as one side of a refit writes them and the other reads them."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from socket import gethostname

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

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
