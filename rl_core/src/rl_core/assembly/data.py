"""From datasets to loaders of tokenised rows; everything is read and checked before a worker starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_core.config.schema import DatasetConfig, RunConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.dataloader import BatchedDataLoader
from rl_core.data.dataset_config import OnTooLong
from rl_core.data.messages import DatumSpec
from rl_core.data.processors import (
    collate_datums,
    collate_preferences,
    conversation_datum,
    preference_datum,
    prompt_datum,
)
from rl_core.errors import ConfigError, DataError
from rl_core.plugins.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where records come from.

    Attributes:
        records: map-style, of records.
        name: what errors call it.
        task_name: of all its records, where whoever chose the source says so.
    """

    records: Any
    name: str
    task_name: str | None = None


class TokenisedRows(Sequence[Any]):
    """A dataset whose records are tokenised when they are asked for.

    Args:
        dataset: map-style, of records.
        process: from a record to a row.
        task_name: of records that name none.
    """

    def __init__(self, dataset: Any, process: Callable[..., Any], *, task_name: str | None) -> None:
        self._dataset = dataset
        self._process = process
        self._task_name = task_name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        record = dict(self._dataset[index])
        if self._task_name is not None:
            record["task_name"] = self._task_name
        return self._process(record, idx=int(index))


def read_source(section: DatasetConfig, registry: Registry) -> Source:
    """The dataset that a section names, read."""
    records = registry.find("dataset", section.dataset_name).load()(section)
    stated = section.task_name if "task_name" in section.model_fields_set else None
    return Source(records=records, name=section.dataset_name, task_name=stated)


def prompt_loader(source: Source, run: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> BatchedDataLoader:
    """Prompts, ended by the header of the assistant's turn."""
    longest = run.data.max_input_seq_length or run.policy.max_total_sequence_length - 1
    if longest >= run.policy.max_total_sequence_length:
        raise ConfigError(
            f"data.max_input_seq_length is {longest}, and policy.max_total_sequence_length is "
            f"{run.policy.max_total_sequence_length}: a prompt of that length leaves no room for an answer. "
            "Lower the one or raise the other."
        )

    def process(record: Mapping[str, Any], *, idx: int) -> DatumSpec:
        question = {**record, "messages": without_answer(record["messages"])}
        too_long = OnTooLong(run.data.on_long_prompt)
        return prompt_datum(question, idx=idx, tokenizer=tokenizer, max_length=longest, on_too_long=too_long)

    return _loader(source, run, process, batch_size=batch_size, shuffle=shuffle, tasks=run.env.keys())


def without_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to the question: an answer that a record brings for imitation must not be shown."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return asked


def conversation_loader(source: Source, run: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> BatchedDataLoader:
    """Conversations that end with the assistant's message."""
    process = partial(conversation_datum, **_limits(run, tokenizer))
    return _loader(source, run, process, batch_size=batch_size, shuffle=shuffle)


def preference_loader(source: Source, run: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> BatchedDataLoader:
    """Pairs of a better and a worse answer; `batch_size` counts pairs."""
    process = partial(preference_datum, **_limits(run, tokenizer))
    return _loader(source, run, process, batch_size=batch_size, shuffle=shuffle, collate=collate_preferences)


def _limits(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "max_length": run.policy.max_total_sequence_length,
        "on_too_long": OnTooLong(run.data.on_long_prompt),
    }


def _loader(
    source: Source,
    run: RunConfig,
    process: Callable[..., Any],
    *,
    batch_size: int,
    shuffle: bool,
    tasks: Collection[str] = (),
    collate: Callable[..., BatchedDataDict[Any]] = collate_datums,
) -> BatchedDataLoader:
    if shuffle and len(source.records) < batch_size:
        raise DataError(
            f"The dataset {source.name!r} has {len(source.records)} records, and a step draws {batch_size}: "
            "draw fewer a step, or give it more data."
        )
    only_task = next(iter(tasks)) if len(tasks) == 1 else None
    rows = TokenisedRows(source.records, process, task_name=source.task_name or _task_of(source.records, only_task, tasks))
    if len(rows):
        rows[0]  # a dataset of another form, or a template that cannot render it, is told before a worker starts
    return BatchedDataLoader(
        rows, batch_size=batch_size, shuffle=shuffle, seed=run.algorithm.seed, drop_last=shuffle, collate=collate
    )


def _task_of(dataset: Any, only_task: str | None, tasks: Collection[str]) -> str | None:
    """The run's one task, where the records name none that the run has."""
    named = dataset[0].get("task_name") if len(dataset) else None
    return only_task if named not in tasks else None
