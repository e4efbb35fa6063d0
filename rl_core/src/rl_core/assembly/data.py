"""From the section `data` to loaders of tokenised rows; everything is read and checked before a worker starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rl_core.config.schema import DatasetConfig, RunConfig
from rl_core.data.dataloader import BatchedDataLoader
from rl_core.data.dataset_config import OnTooLong
from rl_core.data.messages import DatumSpec
from rl_core.data.processors import collate_datums, conversation_datum, prompt_datum
from rl_core.errors import ConfigError, DataError
from rl_core.plugins.registry import Registry

Processor = Callable[..., DatumSpec]


class TokenisedRows(Sequence[DatumSpec]):
    """A dataset whose records are tokenised when they are asked for.

    Args:
        dataset: map-style, of records.
        process: from a record to a row.
        task_name: of records that name none.
        max_length: most tokens; a longer row is cut and left out of the loss where `on_too_long` is drop.
    """

    def __init__(self, dataset: Any, process: Callable[..., DatumSpec], *, task_name: str | None) -> None:
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


def make_dataset(config: DatasetConfig, registry: Registry) -> Any:
    """The dataset that a section names."""
    return registry.find("dataset", config.dataset_name).load()(config)


def prompt_loader(
    section: DatasetConfig, run: RunConfig, registry: Registry, tokenizer: Any, *, batch_size: int, shuffle: bool
) -> BatchedDataLoader:
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

    return _loader(section, run, registry, process, batch_size=batch_size, shuffle=shuffle, tasks=run.env.keys())


def without_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to the question: an answer that a record brings for imitation must not be shown."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return asked


def conversation_loader(
    section: DatasetConfig, run: RunConfig, registry: Registry, tokenizer: Any, *, batch_size: int, shuffle: bool
) -> BatchedDataLoader:
    """Conversations that end with the assistant's message."""
    process = partial(
        conversation_datum,
        tokenizer=tokenizer,
        max_length=run.policy.max_total_sequence_length,
        on_too_long=OnTooLong(run.data.on_long_prompt),
    )
    return _loader(section, run, registry, process, batch_size=batch_size, shuffle=shuffle, tasks=())


def _loader(
    section: DatasetConfig,
    run: RunConfig,
    registry: Registry,
    process: Callable[..., DatumSpec],
    *,
    batch_size: int,
    shuffle: bool,
    tasks: Any,
) -> BatchedDataLoader:
    dataset = make_dataset(section, registry)
    if shuffle and len(dataset) < batch_size:
        raise DataError(
            f"The dataset {section.dataset_name!r} has {len(dataset)} records, and a step draws {batch_size}: "
            "draw fewer a step, or give it more data."
        )
    only_task = next(iter(tasks)) if len(tasks) == 1 else None
    stated = section.task_name if "task_name" in section.model_fields_set else None
    rows = TokenisedRows(dataset, process, task_name=stated or _task_of(dataset, only_task, tasks))
    return BatchedDataLoader(
        rows, batch_size=batch_size, shuffle=shuffle, seed=run.algorithm.seed, drop_last=shuffle, collate=collate_datums
    )


def _task_of(dataset: Any, only_task: str | None, tasks: Any) -> str | None:
    """The run's one task, where the records name none that the run has."""
    named = dataset[0].get("task_name") if len(dataset) else None
    return only_task if named not in tasks else None
