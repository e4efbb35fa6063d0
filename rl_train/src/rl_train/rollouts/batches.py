"""Batches of conversations, or of preference pairs, with a mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.messages import batched_message_log_to_flat_message


class TrainingBatches:
    """Batches for supervised training from a resumable loader.

    Args:
        loader: yields conversations with a `token_loss_mask` on every message; all or none with a `label`.
        pad_token_id: padding of `input_ids`.
    """

    def __init__(self, loader: BatchedDataLoader, *, pad_token_id: int) -> None:
        self._loader = loader
        self._endless = loader.forever()
        self._pad_token_id = pad_token_id

    @property
    def rows(self) -> Sequence[Any]:
        """The tokenized rows that the loader draws from."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._loader)

    def next_batch(self) -> BatchedDataDict[Any]:
        """The next batch; epochs repeat without end."""
        return self._rows(next(self._endless))

    def take(self, rows: int) -> BatchedDataDict[Any]:
        """The next `rows` rows; epochs repeat without end."""
        return self._rows(self._loader.rows_of(self._loader.draw(rows)))

    def epoch(self) -> Iterator[BatchedDataDict[Any]]:
        """The batches of one epoch."""
        return (self._rows(batch) for batch in self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._loader.load_state_dict(state)
        self._endless = self._loader.forever()

    def _rows(self, datums: Sequence[Any]) -> BatchedDataDict[Any]:
        logs = [datum["message_log"] for datum in datums]
        flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": self._pad_token_id})
        labels = [float(datum["label"]) for datum in datums if "label" in datum]
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {
                **({"desirable": torch.tensor(labels)} if labels else {}),
                "input_ids": flat["token_ids"],
                "input_lengths": lengths,
                "token_mask": flat["token_loss_mask"].to(torch.float32),
                "sample_mask": torch.tensor([datum["loss_multiplier"] for datum in datums], dtype=torch.float32),
            }
        )
        if all("task_name" in datum for datum in datums):
            rows["task_name"] = [datum["task_name"] for datum in datums]
        if "images" in flat:
            rows["images"] = flat["images"]
        return rows


class PreferenceBatches(TrainingBatches):
    """Pairs of answers as rows: row 2i is the chosen answer of a pair, row 2i + 1 the rejected one.

    Args:
        loader: yields pairs.
        pad_token_id: padding of `input_ids`.
    """

    def _rows(self, datums: Sequence[Any]) -> BatchedDataDict[Any]:
        answers = [
            # A pair is dropped if one of its answers is too long.
            {"message_log": datum[side], "loss_multiplier": datum["loss_multiplier"], "margin": datum.get("margin", 0.0)}
            for datum in datums
            for side in ("message_log_chosen", "message_log_rejected")
        ]
        rows = super()._rows(answers)
        rows["prompt_id"] = torch.arange(len(datums)).repeat_interleave(2)
        rows["margins"] = torch.tensor([answer["margin"] for answer in answers], dtype=torch.float32)
        return rows
