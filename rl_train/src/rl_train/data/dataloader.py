"""The order in which data is seen: shuffled by seed and epoch, resumable at any row; knows no ranks and no tokenizer.

One loader serves all ranks (batches are sharded after it), so that the order does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.padding import cat_right_padded
from rl_core.data.schema import pad_value
from rl_core.errors import DataError
from rl_train.data.mixing import Mixture, row_order

_GO_BACK = "Give the data that it was, or begin anew (`--resume never`)"


class BatchedDataLoader:
    """Batches of a map-style dataset; each `for` runs to the end of the current epoch.

    A `for` that is left early goes on where it stopped, here or, through `state_dict`, in another process; the state counts a
    batch as seen once it was handed out. The order of epoch e is a permutation drawn from (seed, e) alone.

    Args:
        dataset: Has `len` and items by number.
        batch_size: Rows of a batch.
        shuffle: Whether each epoch has an order of its own; else the dataset's.
        seed: Of the shuffle.
        drop_last: Leave out an epoch's last rows where they do not fill a batch.
        collate: From the rows to a batch; by default `collate_rows`.
        mixture: How the rows are mixed, where the dataset is several ones after each other.
        fingerprint: Of what the rows are made of: a state of other rows is refused; None where it is not known.

    Raises:
        DataError: The dataset is empty, smaller than the one batch that `drop_last` allows, or not of the mixture's size.
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
            raise DataError(f"batch_size is {batch_size}: give at least 1")
        if len(dataset) < (batch_size if drop_last else 1):
            raise DataError(
                f"the dataset has {len(dataset)} rows and a batch takes {batch_size}: there would be no batch at all"
            )
        if mixture is not None and len(mixture) != len(dataset):
            raise DataError(
                f"the mixture is of {len(mixture)} rows and the dataset has {len(dataset)}: give one of its members"
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

    @property
    def epoch(self) -> int:
        """Whole passes done."""
        return self._epoch

    @property
    def next_ordinal(self) -> int:
        """The number of the next row in the loader's endless order, from 0.

        Row r of the order of epoch e has the number e x rows + r. It identifies a draw: it is never repeated, and it depends on
        neither the batch size nor on when a run was resumed. Rows that `drop_last` leaves out leave gaps.
        """
        return self._epoch * len(self.dataset) + self._cursor

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        order = self._order(epoch)
        while self._epoch == epoch:
            start, end = self._cursor, min(self._cursor + self.batch_size, len(order))
            # The state moves on before the batch is out of hand. After the last batch it stands at the next epoch's start:
            # a state at an epoch's very end would resume to an empty epoch.
            left = len(order) - end
            if left < (self.batch_size if self.drop_last else 1):
                self._epoch, self._cursor = epoch + 1, 0
            else:
                self._cursor = end
            yield self.collate([self.dataset[row] for row in order[start:end]])

    def forever(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: enough to go on as if it had never stopped.

        Returns:
            `seed` and `shuffle` of the order, `epoch` (whole passes done), `cursor` (rows of the current pass handed out)
            and `rows` of the dataset, their `fingerprint` where it is known; of a mixture its members as well. JSON.
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
        """Go on from a state, under its seed; the batch size may be another.

        Raises:
            DataError: The state is of other rows, or of another kind of order.
        """
        if state["rows"] != len(self.dataset) or state["shuffle"] != self.shuffle:
            raise DataError(
                f"the state is of {state['rows']} rows with shuffle={state['shuffle']}, the loader has {len(self.dataset)} "
                f"rows with shuffle={self.shuffle}: the order would not be the one that was interrupted. {_GO_BACK}"
            )
        own = (state.get("fingerprint"), self.fingerprint)
        if None not in own and own[0] != own[1]:
            raise DataError(
                "the rows are not those of the state: some have changed, or they stand in another order, so that some would be "
                f"seen twice and others never. {_GO_BACK}"
            )
        members = None if self.mixture is None else self.mixture.state()
        if state.get("mixture") != members:
            raise DataError(
                f"the state is of the mixture {state.get('mixture')}, the loader has {members} (rows, and rows an epoch, of "
                f"each member): the order would not be the one that was interrupted. {_GO_BACK}"
            )
        self.seed, self._epoch, self._cursor = state["seed"], state["epoch"], state["cursor"]
        if len(self.dataset) - self._cursor < (self.batch_size if self.drop_last else 1):
            self._epoch, self._cursor = self._epoch + 1, 0

    def next_rows(self, count: int) -> Sequence[int]:
        """The numbers of the next `count` rows to be drawn, or of those that are left of the epoch."""
        return self._order(self._epoch)[self._cursor : self._cursor + count]

    def _order(self, epoch: int) -> Sequence[int]:
        if self.mixture is not None:
            return self.mixture.order(seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return epoch_order(len(self.dataset), seed=self.seed, epoch=epoch) if self.shuffle else range(len(self.dataset))


def epoch_order(rows: int, *, seed: int, epoch: int) -> list[int]:
    """The permutation of the rows in that epoch; the same on every machine and in every process."""
    return row_order(rows, seed=seed, epoch=epoch).tolist()


def collate_rows(rows: list[Any]) -> BatchedDataDict[Any]:
    """Rows (mappings of the same keys) as a batch.

    Tensors are stacked, those of differing first axes right-padded; numbers become a tensor [B]; anything else is a list.
    `input_ids` without `input_lengths` or `attention_mask` get their `input_lengths`.

    Raises:
        DataError: A row is no mapping, or the rows' keys differ.
    """
    for row in rows:
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            raise DataError(f"a row is {_kind(row)}, another {_kind(rows[0])}: give rows of one form, or a `collate`")
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
