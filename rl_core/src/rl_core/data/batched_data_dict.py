"""`BatchedDataDict`: columns of one batch size, independent of their meaning, sent between processes without needless copies.

Sending uses pickle protocol 5: a tensor is passed as a NumPy view of its memory, out of band, so Ray writes it into its object
store only once. (A non-contiguous column is made contiguous first, and one on a GPU is moved to the CPU.) A dtype that NumPy
lacks, such as bfloat16, is sent as bytes. A small tensor is copied into the message and arrives as a tensor.

Receiving: the column stays a view of the object store, memory that other processes read too. Writing to it would silently
corrupt their batches, hence the rule *copy on touch*: slicing, splitting into microbatches and sending keep the view; reading
a column (or a slice of it) as a tensor makes a private, writable copy, once.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rl_core.data.row_planner import DynamicBatchingArgs, RowPlanner, SequencePackingArgs, ShardPlan, runs_of
from rl_core.data.schema import pad_value
from rl_core.data.shared_prefix import cat_right_padded
from rl_core.errors import DataError

__all__ = ["BatchedDataDict", "ColumnsDifferError", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

DictT = TypeVar("DictT")


class ColumnsDifferError(DataError, KeyError):
    """Batches to be concatenated do not have the same keys."""

    __str__ = Exception.__str__


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Columns of one batch size: tensors [B, ...] and lists of length B.

    Rows are right-padded. Batches pass between processes without copying tensors; for the rule
    (*copy on touch*) on shared memory, see the top of this page.

    Attributes:
        micro_batch_indices: For each global batch of this shard, the (start, end) rows of each microbatch, relative to the
            global batch's first row; None unless sharded with a token budget or packing.
        micro_batch_lengths: For each global batch, the tokens of each microbatch: its padded width (token budget) or all its
            tokens (packing); None likewise.
        elem_counts_per_gb: Number of rows of this shard in each global batch; None if not sharded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[tuple[int, int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        super().__init__(*args, **kwargs)

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float | bool] | None = None
    ) -> Self:
        """Concatenate batches.

        Lists are joined, 1-D tensors concatenated, others right-padded along axis 1 to the widest.

        Args:
            batches: Batches (or plain dicts) with the same keys.
            pad_value_dict: Padding value by key; defaults to `schema.pad_value`.

        Raises:
            ColumnsDifferError: Their keys differ (a KeyError).
            DataError: The columns of a key differ in kind, dtype or number of axes.
        """
        parts = list(batches)
        if not parts:
            return cls()
        for number, part in enumerate(parts):
            if part.keys() != parts[0].keys():
                odd = sorted(part.keys() ^ parts[0].keys())
                raise ColumnsDifferError(f"batch {number} and batch 0 do not have the same keys: {odd} in only one of them")
        pads = pad_value_dict or {}
        return cls({key: _joined(key, [part[key] for part in parts], pads.get(key, pad_value(key))) for key in parts[0]})

    @property
    def size(self) -> int:
        """B, the number of rows; 0 if there are no columns."""
        return len(next(iter(self.data.values()))) if self.data else 0

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, (list, BorrowedColumn)) and not (isinstance(value, torch.Tensor) and value.ndim > 0):
            raise DataError(f"column {key!r} is {_described(value)}: a column must be a tensor [B, ...] or a list of length B")
        if self.data and len(value) != self.size and (others := [name for name in self.data if name != key]):
            raise DataError(
                f"column {key!r} has {len(value)} rows and column {others[0]!r} has {self.size}: "
                "all columns of a batch must have the same batch size"
            )
        self.data[key] = value

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, BorrowedColumn):
            value = self.data[key] = value.tensor()
        return value

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        plan = (self.micro_batch_indices, self.micro_batch_lengths, self.elem_counts_per_gb)
        return _rebuilt, (type(self), {key: portable_column(column) for key, column in self.data.items()}, plan)

    def slice(self, start: int, end: int) -> SlicedDataDict[DictT]:
        """Rows start to end (excluded), as views."""
        return SlicedDataDict[DictT](
            {
                key: column.slice(start, end) if isinstance(column, BorrowedColumn) else column[start:end]
                for key, column in self.data.items()
            }
        )

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """A new batch of these rows, in this order; rows may repeat. A bool tensor [B] selects the rows marked True."""
        rows = torch.as_tensor(indices)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.to(torch.int64)
        return self._mapped(
            lambda column: column[rows.to(column.device)], lambda column: [column[row] for row in rows.tolist()]
        )

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times consecutively; list entries are deep copies, so that samples may diverge."""
        return self._mapped(
            lambda column: column.repeat_interleave(num_repeats, dim=0),
            lambda column: [copy.deepcopy(entry) for entry in column for _ in range(num_repeats)],
        )

    def reorder_data(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Undo a sort in place: row j moves to index indices[j]. Drops the microbatch plan, which becomes invalid.

        Raises:
            DataError: It is not a permutation of the rows.
        """
        order = torch.as_tensor(indices, dtype=torch.int64)
        if not torch.equal(order.sort().values, torch.arange(self.size)):
            raise DataError(f"indices are not a permutation of the {self.size} rows: {order.tolist()[:16]}...")
        self.data = self.select_indices(order.argsort()).data
        self.micro_batch_indices = self.micro_batch_lengths = self.elem_counts_per_gb = None

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate every tensor along axis `dim` to at most `truncated_len`, in place; as views."""
        for key, column in self.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim and column.shape[dim] > truncated_len:
                self[key] = column.narrow(dim, 0, truncated_len)

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors to `device` in place; returns this batch."""
        for key, column in self.items():
            if isinstance(column, torch.Tensor):
                self[key] = to_device(column, device)
        return self

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[DictT]:
        """Shard `rank` of `chunks` equal shards of contiguous rows.

        Raises:
            DataError: The rows do not split evenly, or there is no such shard.
        """
        if self.size % chunks or not 0 <= rank < chunks:
            raise DataError(f"shard {rank} of {chunks} equal shards of {self.size} rows does not exist")
        rows = self.size // chunks
        return self.slice(rank * rows, (rank + 1) * rows)

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[DictT]:
        """Global batch `batch_idx` (from 0) of this shard, with its microbatch plan.

        `batch_size` is the number of rows of this shard in a global batch; it is ignored if the batch was sharded.

        Raises:
            DataError: There is no such global batch, or the batch was not sharded and no size is given.
        """
        counts = self.elem_counts_per_gb
        if counts is None and batch_size is None:
            raise DataError("a batch that was not sharded has no global batches: give batch_size")
        counts = counts or [end - start for start, end in runs_of(self.size, batch_size or self.size)]
        if not 0 <= batch_idx < len(counts):
            raise DataError(f"global batch {batch_idx} does not exist: there are {len(counts)}")
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    @overload
    def shard_by_batch_size(self, shards: int, batch_size: int | None = None) -> list[SlicedDataDict[DictT]]: ...

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, *, dynamic_batching_args: DynamicBatchingArgs, rows_per_unit: int = 1
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, *, sequence_packing_args: SequencePackingArgs, rows_per_unit: int = 1
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        rows_per_unit: int = 1,
        keep_together: str | None = None,
    ) -> list[SlicedDataDict[DictT]] | tuple[list[SlicedDataDict[DictT]], list[int]]:
        """Split the batch over shards: each global batch of `batch_size` rows is divided among all of them.

        [A A B B C C D D] with 2 shards and batch size 2 gives [A B C D] twice.

        Args:
            shards: Number of shards (data-parallel ranks).
            batch_size: Rows of a global batch over all shards; None for all rows.
            dynamic_batching_args: Microbatches of length-sorted rows under a token budget.
            sequence_packing_args: Microbatches of packed rows.
            rows_per_unit: Rows that a loss reads together, from row 0 on: they stay adjacent, in order, within one shard
                and one microbatch. Without a plan, the caller must ensure that shards are multiples of it.
            keep_together: Key of a column [B] int64, such as `prompt_id`: rows with equal values become adjacent and, as far as
                they fit, share a microbatch. Token budgets then count a common prefix of such rows once, and no padding.

        Returns:
            `list[SlicedDataDict]`, one per shard; with a plan or `keep_together` `(shards, sorted_indices)`: row j of
            `from_batches(shards)` was row `sorted_indices[j]`, so that `reorder_data(sorted_indices)` restores the order.

        Raises:
            DataError: The rows do not divide evenly, a row exceeds the token budget, or both modes are requested.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise DataError("dynamic batching and sequence packing are mutually exclusive: use one of them")
        planner = RowPlanner(
            rows=self.size,
            shards=shards,
            batch_size=batch_size,
            rows_per_unit=rows_per_unit,
            prompts=self[keep_together].tolist() if keep_together is not None else None,
        )
        args = dynamic_batching_args or sequence_packing_args
        plans = planner.by_count() if args is None else planner.by_tokens(self, args, packed=sequence_packing_args is not None)
        parts = [self._shard(plan) for plan in plans]
        if args is None and keep_together is None:
            return parts
        return parts, [row for plan in plans for row in plan.rows]

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[DictT]]:
        """Microbatches of `microbatch_size` rows, as views; the last may have fewer."""
        return (self.slice(start, end) for start, end in runs_of(self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict[DictT]]:
        """The microbatches of the token-budget plan, truncated to their width, as views."""
        for start, end, length in self._planned("dynamic_batching_args"):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, length)
            yield microbatch

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[DictT]]:
        """The rows of each bin of the packing plan, still padded, as views; `pack_rows` concatenates them."""
        return (self.slice(start, end) for start, end, _ in self._planned("sequence_packing_args"))

    def all_gather(self, group: dist.ProcessGroup | None = None) -> Self:
        """Gather the rows of every rank of the group, in rank order, on this batch's device.

        Widths may differ between ranks (rows are padded), keys may not.
        """
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self, group=group)
        gathered = type(self).from_batches(parts)
        devices = {column.device for column in self.data.values() if isinstance(column, torch.Tensor)}
        return gathered.to(devices.pop()) if len(devices) == 1 else gathered

    def _mapped(self, tensors: Callable[[torch.Tensor], torch.Tensor], lists: Callable[[list[Any]], list[Any]]) -> Self:
        return type(self)({key: lists(value) if isinstance(value, list) else tensors(value) for key, value in self.items()})

    def _shard(self, plan: ShardPlan) -> SlicedDataDict[DictT]:
        rows = plan.rows
        contiguous = rows == list(range(rows[0], rows[0] + len(rows))) if rows else True
        start = rows[0] if rows else 0
        shard = self.slice(start, start + len(rows)) if contiguous else SlicedDataDict[DictT](self.select_indices(rows))
        shard.micro_batch_indices = plan.micro_batch_indices
        shard.micro_batch_lengths = plan.micro_batch_lengths
        shard.elem_counts_per_gb = plan.elem_counts_per_gb
        return shard

    def _planned(self, asked_by: str) -> Iterator[tuple[int, int, int]]:
        """First row, end and length of each planned microbatch."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise DataError(f"this batch has no microbatch plan: create it with shard_by_batch_size({asked_by}=...)")
        first = 0
        for indices, lengths in zip(self.micro_batch_indices, self.micro_batch_lengths, strict=True):
            for (start, end), length in zip(indices, lengths, strict=True):
                yield first + start, first + end, length
            first += indices[-1][1]


class SlicedDataDict(BatchedDataDict[DictT]):
    """Part of a batch."""


def _rebuilt(cls: type[BatchedDataDict[Any]], columns: dict[str, Any], plan: tuple[Any, Any, Any]) -> Any:
    batch = cls()
    batch.data = {key: arrived_column(column) for key, column in columns.items()}
    batch.micro_batch_indices, batch.micro_batch_lengths, batch.elem_counts_per_gb = plan
    return batch


def _joined(key: str, parts: list[Any], padding: float) -> Any:
    if all(isinstance(part, list) for part in parts):
        return [entry for part in parts for entry in part]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise DataError(f"column {key!r} is a list in one batch and a tensor in another")
    kinds = {(part.dtype, part.ndim, tuple(part.shape[2:])) for part in parts}
    if len(kinds) > 1:
        raise DataError(f"column {key!r} cannot be concatenated: {', '.join(sorted(_described(part) for part in parts))}")
    return cat_right_padded(parts, pad_value=padding)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


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
