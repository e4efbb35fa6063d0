"""How columns travel between processes with no needless copy; knows pickle's protocol 5, not who carries the bytes.

Sending copies nothing: a tensor is handed over as a NumPy view of its own memory, which protocol 5 passes out of band, so
that Ray writes it into its object store once. (A column that is not contiguous is made so first, one on a GPU is brought to
the CPU.) A dtype that NumPy lacks, such as bfloat16, travels as bytes.

Receiving copies nothing either: the column stays a view of the store, memory that other processes read too. Writing there
would corrupt their batches in silence, hence the rule *copy on touch*: slicing, dealing out microbatches and sending on keep
the view; whoever takes a column (or a slice of it) as a tensor gets a private copy, once, and may write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BorrowedColumn:
    """A column in memory that is not ours to write to.

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
        value = self.value.detach().cpu().contiguous()
        return _owned, (value.reshape(-1).view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def pack_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a batch in the form that is pickled."""
    return {key: _portable_column(column) for key, column in columns.items()}


def unpack_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a batch from that form: tensors of our own where the memory is ours, else borrowed ones."""
    return {key: _arrived(column) for key, column in columns.items()}


def _portable_column(column: Any) -> Any:
    if not isinstance(column, torch.Tensor):
        return _portable(column)
    value = column.detach().cpu().contiguous()
    row_bytes = value[0].numel() * value.element_size() if len(value) else 0
    rows = value.reshape(-1).view(torch.uint8).numpy().reshape(len(value), row_bytes)
    return BorrowedColumn(rows, value.dtype, tuple(value.shape[1:]))


def _portable(value: Any) -> Any:
    """The same nest of plain lists, tuples and dicts with portable tensors in it; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return _PortableTensor(value)
    if type(value) is dict:
        return {key: _portable(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(entry) for entry in value)
    return value


def _arrived(column: Any) -> Any:
    if isinstance(column, BorrowedColumn) and column.rows.flags.writeable:
        return _tensor(column.rows, column.dtype, column.row_shape)
    return column


def _owned(flat: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = flat if flat.flags.writeable else flat.copy()
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def _tensor(rows: Bytes, dtype: torch.dtype, row_shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rows.reshape(-1)).view(dtype).reshape(len(rows), *row_shape)
