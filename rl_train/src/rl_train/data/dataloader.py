"""A data loader whose order depends on seed and epoch, and which can be resumed at any row.

One loader serves all ranks (batches are sharded after it), so the order does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.data.shared_prefix import cat_right_padded
from rl_core.errors import DataError
from rl_train.data.mixing import Mixture, row_order

_KEPT_ORDERS = 2
"""Orders kept in memory: rows that were put back may belong to the epoch before the current one."""
_REMEDY = "Use the original data, or start a new run (`--resume never`)"


class BatchedDataLoader:
    """Batches of a map-style dataset; each `for` runs to the end of the current epoch.

    A loop that is left early continues where it stopped, here or, with `state_dict`, in another process; the state counts a
    batch as seen once it was yielded. The order of epoch e is a permutation that only depends on (seed, e).

    Args:
        dataset: Map-style dataset.
        batch_size: Rows per batch.
        shuffle: Whether each epoch is shuffled; else rows are in the order of the dataset.
        seed: Seed of the shuffle.
        drop_last: Drop the last rows of an epoch if they do not fill a batch.
        collate: Turns rows into a batch; `collate_rows` by default.
        mixture: How to mix the rows if the dataset concatenates several datasets.
        fingerprint: Fingerprint of the rows: a state with another one is rejected; None if unknown.

    Raises:
        DataError: The dataset is empty, smaller than one batch with `drop_last`, or does not have the size of the mixture.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        mixture: Mixture | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}: it must be at least 1")
        if len(dataset) < (batch_size if drop_last else 1):
            raise DataError(
                f"the dataset has {len(dataset)} rows, too few for one batch of {batch_size}: lower the batch size or add rows"
            )
        if mixture is not None and len(mixture) != len(dataset):
            raise DataError(
                f"the mixture has {len(mixture)} rows, but the dataset has {len(dataset)}: use the dataset of its members"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.collate = collate or collate_rows
        self.mixture = mixture
        self.fingerprint = fingerprint
        self._epoch = 0
        self._cursor = 0
        self._orders: dict[tuple[int, int], Sequence[int]] = {}

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._epoch

    @property
    def next_ordinal(self) -> int:
        """The number of the next row in the endless order of the loader, from 0.

        Row r of the order of epoch e has the number e x rows + r. It identifies a draw: it is never repeated, and it depends
        neither on the batch size nor on resumes. Rows that `drop_last` drops leave gaps.
        """
        return self._epoch * len(self.dataset) + self._cursor

    def __len__(self) -> int:
        """Number of batches per epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        least = self.batch_size if self.drop_last else 1
        self._skip_rest(least)
        epoch = self._epoch
        while self._epoch == epoch:
            ordinals = self._advance(self.batch_size, len(self.dataset))
            # The state advances before the batch is yielded. After the last batch it is the start of the next epoch: a state
            # at the end of an epoch would resume with an empty epoch.
            self._skip_rest(least)
            yield self.rows_of(ordinals)

    def forever(self) -> Iterator[Any]:
        """Endless batches, epoch after epoch."""
        while True:
            yield from self

    def draw(self, count: int) -> list[int]:
        """Take the next `count` rows of the endless order; returns their ordinals, see `next_ordinal`.

        The order does not depend on how many rows are drawn at once. A draw may extend over several epochs. With `drop_last`,
        the last rows of an epoch that do not fill a batch are left out.
        """
        rows = len(self.dataset)
        end = len(self) * self.batch_size if self.drop_last else rows
        ordinals: list[int] = []
        self._skip_rest(rows - end + 1)
        while len(ordinals) < count:
            ordinals += self._advance(count - len(ordinals), end)
            self._skip_rest(rows - end + 1)
        return ordinals

    def draws(self, epochs: int) -> int:
        """Number of draws of `batch_size` rows that use every row of this many epochs; only the last one may go beyond them."""
        return epochs * len(self) if self.drop_last else -(-epochs * len(self.dataset) // self.batch_size)

    def rows_of(self, ordinals: Sequence[int]) -> Any:
        """The rows with these ordinals as a batch, in this order; the position of the loader does not change."""
        found = []
        for ordinal in ordinals:
            epoch, position = divmod(ordinal, len(self.dataset))
            found.append(self.dataset[self.order(epoch)[position]])
        return self.collate(found)

    def _advance(self, most: int, end: int) -> range:
        """The ordinals of the next rows of the current epoch: at most `most`, and before row `end`."""
        first = self.next_ordinal
        self._cursor = min(self._cursor + most, end)
        return range(first, self.next_ordinal)

    def _skip_rest(self, least: int) -> None:
        """Start the next epoch if fewer than `least` rows of the current one are left."""
        if len(self.dataset) - self._cursor < least:
            self._epoch, self._cursor = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, for an exact resume.

        Returns:
            `seed` and `shuffle`, `epoch` (finished epochs), `cursor` (rows yielded in the current epoch), `rows` of the
            dataset, their `fingerprint` if known, and the members of a mixture, as JSON.
        """
        state: dict[str, Any] = {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "rows": len(self.dataset),
        }
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        return state if self.mixture is None else {**state, "mixture": self.mixture.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state with its seed; the batch size may differ.

        Raises:
            DataError: The state belongs to other rows or another order.
        """
        if state["rows"] != len(self.dataset) or state["shuffle"] != self.shuffle:
            raise DataError(
                f"the state has {state['rows']} rows with shuffle={state['shuffle']}, but the loader has {len(self.dataset)} "
                f"rows with shuffle={self.shuffle}, so the order of the interrupted run cannot continue. {_REMEDY}"
            )
        own = (state.get("fingerprint"), self.fingerprint)
        if None not in own and own[0] != own[1]:
            raise DataError(
                "the rows differ from those of the state: some have changed, or their order has, so some would be seen twice "
                f"and others never. {_REMEDY}"
            )
        members = None if self.mixture is None else self.mixture.state()
        if state.get("mixture") != members:
            raise DataError(
                f"the state has the mixture {state.get('mixture')}, but the loader has {members} (rows, and rows per epoch, of "
                f"each member), so the order of the interrupted run cannot continue. {_REMEDY}"
            )
        self.seed, self._epoch, self._cursor = state["seed"], state["epoch"], state["cursor"]

    def next_rows(self, count: int) -> Sequence[int]:
        """The numbers of the next `count` rows, or of the rest of the epoch."""
        return self.order(self._epoch)[self._cursor : self._cursor + count]

    def order(self, epoch: int) -> Sequence[int]:
        """The row numbers of an epoch, from 0."""
        key = (self.seed, epoch)
        if key not in self._orders:
            self._orders = dict([*self._orders.items(), (key, self._new_order(epoch))][-_KEPT_ORDERS:])
        return self._orders[key]

    def _new_order(self, epoch: int) -> Sequence[int]:
        if self.mixture is not None:
            return self.mixture.order(seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return epoch_order(len(self.dataset), seed=self.seed, epoch=epoch) if self.shuffle else range(len(self.dataset))


def epoch_order(rows: int, *, seed: int, epoch: int) -> list[int]:
    """The permutation of the rows in that epoch; the same on every machine and in every process."""
    return row_order(rows, seed=seed, epoch=epoch).tolist()


def collate_rows(rows: list[Any]) -> BatchedDataDict[Any]:
    """Rows (mappings of the same keys) as a batch.

    Tensors are stacked, and right-padded if their first axes differ; numbers become a tensor [B]; anything else is a list.
    `input_lengths` is added for `input_ids` without `input_lengths` or `attention_mask`.

    Raises:
        DataError: A row is not a mapping, or the keys of the rows differ.
    """
    for row in rows:
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            raise DataError(f"one row is {_kind(row)}, another {_kind(rows[0])}: use rows with the same keys, or set `collate`")
    columns = {key: _column(key, [row[key] for row in rows]) for key in rows[0]}
    tokens = rows[0].get("input_ids")
    if isinstance(tokens, torch.Tensor) and not {"input_lengths", "attention_mask"} & columns.keys():
        columns["input_lengths"] = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64)
    return BatchedDataDict(columns)


def _column(key: str, values: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return cat_right_padded([value.unsqueeze(0) for value in values], pad_value=pad_value(key))
    if all(isinstance(value, (bool, int, float)) for value in values):
        return torch.tensor(values)
    return values


def _kind(row: Any) -> str:
    return f"a mapping of {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
