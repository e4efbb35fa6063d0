"""Tokenizes the records of a dataset on access."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.data.conversation_tokens import decode
from rl_core.errors import DataError
from rl_train.data.bad_rows import BadRow, BadRowError
from rl_train.data.dataset_classes import record_of
from rl_train.data.guarded_text import control_texts, keeps_text
from rl_train.data.holdout import row_location
from rl_train.data.task_choice import TaskChoice

_FIELDS = ("messages", "prompt", "chosen", "rejected", "prefill", "tools")
_log = logging.getLogger("rlcore")


class TokenizedRows(Sequence[Any]):
    """A dataset whose records are tokenized on access.

    Args:
        records: map-style dataset of records.
        process: turns a record into a row; a partial with `tokenizer`, or without it to give no warnings.
        tasks: the task of each record.
        name: name of the dataset in errors.
    """

    def __init__(self, records: Any, process: Callable[..., Any], *, tasks: TaskChoice, name: str = "dataset") -> None:
        self.records = records
        self._tokenizer, self._warned_of = getattr(process, "keywords", {}).get("tokenizer"), set[int]()
        self._process, self._is_end_checked = process, False
        self._tasks = tasks
        self._name = name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        try:
            record = dict(record_of(self.records, index, name=self._name))
            task = self._tasks.of_record(record.get("task_name"))
            if task is not None:
                record["task_name"] = task
            datum = self._process(record, idx=int(index))
            if datum.get("task_name") is None and task is not None:  # left out by the processor of a user
                datum = {**datum, "task_name": task}
            self._tasks.check(datum.get("task_name"))
            self._warn_of_control_tokens(record, int(index))
            self._warn_of_a_missing_end(datum)
        except DataError as error:
            raise BadRowError(BadRow.of(self.row_location(index), error)) from error
        return datum

    def row_location(self, index: int) -> str:
        """Name of the dataset and location of the row of a record."""
        return f"{self._name}: {row_location(self.records, index)}"

    def _warn_of_control_tokens(self, record: Mapping[str, Any], index: int) -> None:
        """Name a row whose text has control tokens: each of the first five, then every hundredth."""
        tokenizer, fields = self._tokenizer, [record.get(name) for name in _FIELDS]
        if tokenizer is None or index in self._warned_of or not (names := control_texts(tokenizer, *fields)):
            return
        self._warned_of.add(index)
        if vars(tokenizer).get("parse_control_tokens") or ((count := len(self._warned_of)) > 5 and count % 100):
            return
        kept = "is tokenized as text, not as a control token (policy.tokenizer.parse_control_tokens: true changes this)"
        parsed = f"becomes a control token, because {type(tokenizer).__name__} cannot tokenize it as text. Remove it"
        become = kept if keeps_text(tokenizer) else parsed
        where, texts = self.row_location(index), ", ".join(names)
        _log.warning("%s has the text %s, which %s. Rows with such text so far: %d", where, texts, become, count)

    def _warn_of_a_missing_end(self, datum: Mapping[str, Any]) -> None:
        """Warn if the first trained answer of supervised training ends with its content."""
        last = (datum.get("message_log") or [{}])[-1]
        mask, content = last.get("token_loss_mask"), last.get("content")
        if self._tokenizer is None or self._is_end_checked or mask is None or not mask.any() or not datum["loss_multiplier"]:
            return
        self._is_end_checked = True
        trained = decode(self._tokenizer, last["token_ids"][mask > 0].tolist()).rstrip()
        if isinstance(content, str) and content.strip() and not last.get("tool_calls") and trained.endswith(content.rstrip()):
            _log.warning(
                "%s: nothing follows the text of answers, so training does not teach the model to end them. Use a chat "
                "template that writes an end token after each answer (policy.tokenizer.chat_template)",
                self._name,
            )
