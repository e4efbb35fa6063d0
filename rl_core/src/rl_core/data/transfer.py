"""Passes columns between processes without needless copies, using pickle protocol 5.

Sending: a tensor is passed as a NumPy view of its memory, which protocol 5 transfers out of band, so Ray writes it into
its object store only once. (A non-contiguous column is made contiguous first, and one on a GPU is moved to the CPU.) A dtype
that NumPy lacks, such as bfloat16, is sent as bytes. A small tensor is copied into the message and arrives as a tensor.

Receiving: the column stays a view of the object store, memory that other processes read too. Writing to it would silently
corrupt their batches, hence the rule *copy on touch*: slicing, splitting into microbatches and sending keep the view; reading
a column (or a slice of it) as a tensor makes a private, writable copy, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
_SMALL = 4096  # bytes of the largest tensor that is part of the message, if its dtype is one of these
_NAMES = {getattr(torch, name): name for name in ("int64", "float32", "bool", "int32", "uint8", "float64")}


def to_device(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """The tensor on `device`. The host does not wait for a GPU: pinned memory is copied while it continues."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class BorrowedColumn:
    """A column in memory that must not be written to.

    Attributes:
        rows: [B, bytes of a row] uint8, read-only.
        dtype: The tensor's dtype.
        row_shape: The shape of one row.
    """

    rows: Bytes
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, end: int) -> BorrowedColumn:
        """Rows start..end, still borrowed."""
        return BorrowedColumn(self.rows[start:end], self.dtype, self.row_shape)

    def tensor(self) -> torch.Tensor:
        """A private copy: [B, *row_shape], on the CPU."""
        return _tensor(self.rows.copy(), self.dtype, self.row_shape)


@dataclass(frozen=True)
class _PortableTensor:
    """Pickles as bytes, unpickles as a tensor: for tensors inside list columns, such as the tokens of a message."""

    value: torch.Tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _entry, (portable_column(self.value[None]),)


def portable_column(column: Any) -> Any:
    """A column in the form in which it is pickled; `arrived_column` is the inverse."""
    if not isinstance(column, torch.Tensor):
        return _portable(column)
    if 0 < column.nbytes <= _SMALL and column.dtype in _NAMES:  # no objects, because each takes microseconds to pickle
        return _NAMES[column.dtype], (*column.shape,), bytearray(column.numpy(force=True).tobytes())
    value = column.detach().cpu().contiguous()
    rows = value.reshape(-1).view(torch.uint8).numpy().reshape(len(value), value.nbytes // max(len(value), 1))
    return BorrowedColumn(rows, value.dtype, tuple(value.shape[1:]))


def _portable(value: Any) -> Any:
    """The same nested lists, tuples and dicts with portable tensors; other values unchanged."""
    if isinstance(value, torch.Tensor):
        return _PortableTensor(value)
    if type(value) is dict:
        return {key: _portable(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(entry) for entry in value)
    return value


def arrived_column(column: Any) -> Any:
    """A column that was unpickled: a tensor if it is small or the memory is writable, else a borrowed column."""
    if isinstance(column, tuple):
        dtype, shape, data = column
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)
    if isinstance(column, BorrowedColumn) and column.rows.flags.writeable:
        return _tensor(column.rows, column.dtype, column.row_shape)
    return column


def _entry(column: Any) -> torch.Tensor:
    """The only row of a portable column."""
    arrived = arrived_column(column)
    return (arrived.tensor() if isinstance(arrived, BorrowedColumn) else arrived)[0]


def _tensor(rows: Bytes, dtype: torch.dtype, row_shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rows.reshape(-1)).view(dtype).reshape(len(rows), *row_shape)
