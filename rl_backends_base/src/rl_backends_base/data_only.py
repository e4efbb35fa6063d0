"""Reads the files of a training state as data, without running code that they contain, and explains damaged files.

Two things in a folder of torch.distributed.checkpoint are pickles, which can run code when torch loads them: `.metadata`, and
every entry that it declares as bytes instead of a tensor. Here the former may refer only to the classes that metadata consists
of, and the latter are loaded with `weights_only`. Tensors are always read by torch with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from rl_core.errors import CheckpointError, CheckpointWriteError

METADATA: Final = ".metadata"
_CLASSES: Final = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    # Megatron-Core saves the plans that the ranks wrote by.
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
_ALLOWED: Final[dict[tuple[str, str], Any]] = {
    **{(found.__module__, found.__qualname__): found for found in _CLASSES},
    **{("torch", name): found for name, found in vars(torch).items() if isinstance(found, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # The folder's own path, which is never read; a pure path does not access the file system.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves only the names that metadata needs."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it refers to {module_name}.{global_name}, which does not belong in such metadata and could run code"
            ) from None


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a torch.distributed.checkpoint folder.

    Raises:
        CheckpointError: it is missing or damaged, or refers to anything that does not belong in metadata.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, so there is no training state to continue from.") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} was not loaded: {type(error).__name__}: {error}. Use another checkpoint.") from error
    if problem := _problem(metadata):
        raise CheckpointError(f"{path} is damaged: {problem}. Use another checkpoint.")
    checked: Metadata = metadata
    return checked


def _problem(value: object) -> str | None:
    """Why torch cannot have written the metadata, or None."""
    if not isinstance(value, Metadata) or not isinstance(value.state_dict_metadata, dict):
        return f"it contains {type(value).__name__} instead of metadata"
    entries: dict[Any, Any] = value.state_dict_metadata
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            return f"its entry {name!r} is {type(entry).__name__}"
    if not isinstance(value.storage_data, dict):
        return "it does not say where tensors are stored"
    for info in value.storage_data.values():
        stored_in = getattr(info, "relative_path", None)
        if not isinstance(stored_in, str) or Path(stored_in).name != stored_in:
            return f"it names the file {stored_in!r}, which is not in its folder"
    return None


class DataOnlyReader(FileSystemReader):
    """Torch's reader with `read_metadata` of this module."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = read_metadata(Path(self.path))
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class DataOnlyBytes:
    """Mixin of a torch planner: loads byte entries as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a byte entry; CheckpointError if it contains more than data."""
        try:
            data = torch.load(value, weights_only=True)
        except Exception as error:
            entry = read_item.dest_index.fqn
            raise CheckpointError(f"The entry {entry} was not loaded: {reason_of(error)}") from error
        # Torch loads its input without restrictions, so it gets our own bytes.
        own = io.BytesIO()
        torch.save(data, own)
        own.seek(0)
        super().load_bytes(read_item, own)  # type: ignore[misc]


DAMAGE_ERRORS: Final = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)
"""What torch and Megatron raise for damaged files."""
TRAINER_FILE: Final = "trainer.pt"
"""File of rank 0 with the weight version, the schedule and the format number."""


def read_trainer_file(folder: Path, *, expected_format: int) -> dict[str, Any]:
    """The content of `trainer.pt`.

    Raises:
        CheckpointError: the file is missing or damaged, or has another format number.
    """
    values = read_state_file(folder / TRAINER_FILE)
    if values.get("format") != expected_format:
        raise CheckpointError(
            f"{folder} has format {values.get('format')}, but this rlcore reads {expected_format}: use the one that wrote it."
        )
    return values


def read_state_file(path: Path) -> dict[str, Any]:
    """A mapping that `torch.save` wrote; nothing in the file is executed.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: there is no training state to resume from.") from error
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(f"{path} is damaged: {reason_of(error)}. Use another checkpoint.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it contains {type(state).__name__}, not a mapping. Use another checkpoint.")
    return dict(state)


def reason_of(error: BaseException) -> str:
    """The type and text of an error of torch, without tracebacks of ranks or advice to load files that can run code."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {reason_of(reason)}" for rank, (reason, _) in error.failures.items())
    if "`weights_only`" in str(error):
        return "it contains objects other than tensors and plain data, which could run code"
    return f"{type(error).__name__}: {error}"


def write_error(folder: Path, error: CheckpointException) -> CheckpointWriteError | KeyboardInterrupt:
    """The error for a training state that torch could not write; an interruption, which torch converts too, is unchanged."""
    for reason, _ in error.failures.values():
        if isinstance(reason, KeyboardInterrupt):
            return reason
    return CheckpointWriteError(f"The training state could not be written to {folder}: {reason_of(error)}")
