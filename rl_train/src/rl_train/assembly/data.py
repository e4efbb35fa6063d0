"""Builds data loaders of tokenized rows from datasets.

All data is read before a worker starts, and its first rows are tokenized, so that unusable rows are not found hours later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl_core.config.schema import DatasetConfig
from rl_core.errors import ConfigError, DataError, UserError
from rl_core.plugins.registry import Registry
from rl_train.config.rules.run import tasks_of
from rl_train.config.schema import DataConfig, RunConfig
from rl_train.data.arrow_rows import ConcatDataset
from rl_train.data.conversations import begun_answer, without_answer
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.datasets import make_dataset
from rl_train.data.holdout import Subset, held_out
from rl_train.data.messages import DatumSpec
from rl_train.data.mixing import Mixture
from rl_train.data.processors import (
    TokenizedRows,
    check_processor_result,
    conversation_datum,
    preference_datum,
    prompt_datum,
    unpaired_datum,
)
from rl_train.data.records import SKIP_BAD_ROWS, BadRow, BadRowError, BadRowsError, bad_row_lines, load_function
from rl_train.data.row_sections import OnBadRow, OnTooLong
from rl_train.data.tasks import choose_tasks
from rl_train.errors import reporting_errors
from rl_train.tools.task_tools import TaskTools

_log = logging.getLogger("rlcore")
_FIRST_ROWS = 100
"""Rows in which a final message of the assistant is looked for."""
_NO_TASKS: tuple[str, Collection[str]] = ("env", ())
"""The result of `tasks_of` for rows whose tasks are not checked."""


class BadRows:
    """Counts and logs the rows that `on_bad_row: skip` drops from a run's data; each row is counted once.

    Attributes:
        count: Number of dropped rows.
    """

    def __init__(self) -> None:
        self.count = 0
        self._locations: set[tuple[str, str]] = set()

    def add(self, count: int, dataset: str, reasons: Sequence[str]) -> None:
        """Count rows that could not be read, and log the reasons."""
        self.count += count
        if count:
            listed = "".join(f"\n  {reason}" for reason in reasons)
            rows = "1 bad row" if count == 1 else f"{count} bad rows"
            is_are = "is" if count == 1 else "are"
            _log.warning("%s of %s %s skipped (on_bad_row: skip):%s", rows, dataset, is_are, listed)

    def add_rows(self, dataset: str, rows: Sequence[BadRow]) -> None:
        """Count rows that could not be tokenized, once per location: the same rows may be tokenized for several uses."""
        new = [row for row in rows if (dataset, row.location) not in self._locations]
        self._locations.update((dataset, row.location) for row in new)
        self.add(len(new), dataset, bad_row_lines(new))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of records: one dataset or a mixture.

    Attributes:
        records: map-style dataset of records; for a mixture, the records of all members.
        name: name in error messages.
        task_name: task of all its records; None if the records set it.
        component: its dataset component; None if it has none.
        processor: dotted path of the function that tokenizes its records; the built-in one if None.
        on_bad_row: what happens to a record that cannot be tokenized.
        bad_rows: counts skipped rows, shared by all data of a run.
        members: the datasets of a mixture, by name.
        weights: sampling weights of the members; None if each row is used once per epoch.
        may_begin_answers: whether it is not known if a final message of the assistant is the beginning of an answer.
    """

    records: Any
    name: str
    task_name: str | None = None
    component: str | None = None
    processor: str | None = None
    on_bad_row: OnBadRow = OnBadRow.ERROR
    bad_rows: BadRows = field(default_factory=BadRows)
    members: Mapping[str, Source] | None = None
    weights: Mapping[str, float] | None = None
    may_begin_answers: bool = False

    @property
    def datasets(self) -> Collection[Source]:
        """The members of a mixture, or the dataset itself."""
        return [self] if self.members is None else self.members.values()


def read_source(
    section: DatasetConfig,
    registry: Registry,
    data: DataConfig | None = None,
    *,
    name: str | None = None,
    bad_rows: BadRows | None = None,
) -> Source:
    """The dataset of a section.

    Args:
        section: The section.
        registry: Used to look up datasets.
        data: Settings of all datasets; `data.prompt` sets the defaults of the section.
        name: Name in error messages; the dataset's own name by default.
        bad_rows: Counts skipped rows; a new counter by default.
    """
    section = section if data is None else data.with_prompt(section)
    records = make_dataset(registry.find("dataset", section.dataset_name).load(), section)
    source = Source(
        records=records,
        name=name or section.dataset_name,
        task_name=section.task_name if "task_name" in section.model_fields_set else None,
        component=section.dataset_name,
        processor=section.processor,
        on_bad_row=OnBadRow(getattr(section, "on_bad_row", OnBadRow.ERROR)),
        bad_rows=bad_rows or BadRows(),
        may_begin_answers=getattr(section, "continues_answers", False) is None,
    )
    source.bad_rows.add(getattr(records, "skipped", 0), source.name, getattr(records, "reasons", ()))
    return source


def read_data(data: DataConfig, registry: Registry) -> tuple[Source | None, Source | None]:
    """The training data, one dataset or a mixture, and the validation data, which `data.split` holds out of the training data.

    Raises:
        DataError: A dataset cannot be read, or a split leaves one of the two empty.
    """
    read_one = partial(_source_at, data=data, registry=registry, bad_rows=BadRows())
    validation = None if data.validation is None else read_one("validation", data.validation)
    if data.mix:
        members = {name: read_one(f"mix.{name}", section) for name, section in data.mix.items()}
        train = _mixed(members, {name: section.weight or 1.0 for name, section in data.mix.items()})
    elif data.train is not None:
        train = read_one("train", data.train)
    else:
        return None, validation
    if data.split is None:
        return train, validation
    hold_out = partial(_hold_out, fraction=data.split.validation, seed=data.split.seed)
    if train.members is None:
        return hold_out(train)
    sides = {name: hold_out(member) for name, member in train.members.items()}
    assert train.weights is not None
    return _mixed({name: training for name, (training, _) in sides.items()}, train.weights), _mixed(
        {name: out for name, (_, out) in sides.items()}, None
    )


def read_validation_sets(data: DataConfig, registry: Registry) -> dict[str, Source]:
    """The datasets of `data.validation_sets`, by name.

    Raises:
        DataError: A dataset cannot be read.
    """
    sections = data.validation_sets.items()
    return {name: _source_at(f"validation_sets.{name}", section, data, registry) for name, section in sections}


def _source_at(
    key: str, section: DatasetConfig, data: DataConfig, registry: Registry, bad_rows: BadRows | None = None
) -> Source:
    """The dataset at a key of `data`, which names it in errors if it is one of several."""
    try:
        return read_source(section, registry, data, name=key if "." in key else None, bad_rows=bad_rows)
    except UserError as error:
        if error.key is None or not error.key.startswith("data."):  # none, or one of the section
            error.key = ".".join(["data", key, *([error.key] if error.key else [])])
        raise


def prompt_loader(
    source: Source,
    run: RunConfig,
    tokenizer: Any,
    *,
    batch_size: int,
    shuffle: bool,
    tools: TaskTools | None = None,
) -> BatchedDataLoader:
    """Prompts that end with the generation prompt of the chat template, with their own tools or those of their task."""
    offered = tools or TaskTools()
    if run.algorithm.runtime_needs.rollouts is not None:
        _warn_of_left_out_answers(source)
    prompt_limit = run.data.max_input_seq_length or run.policy.max_total_sequence_length - 1
    if prompt_limit >= run.policy.max_total_sequence_length:
        raise ConfigError(
            f"data.max_input_seq_length is {prompt_limit}, but policy.max_total_sequence_length is "
            f"{run.policy.max_total_sequence_length}: a prompt of that length leaves no tokens for an answer. "
            "Lower data.max_input_seq_length or raise policy.max_total_sequence_length."
        )

    def process(record: Mapping[str, Any], *, idx: int, **limits: Any) -> DatumSpec:
        if "messages" not in record:
            raise DataError(f"it has {sorted(record)} but no `messages`: use a dataset of prompts, not of preferences")
        messages, prefill = without_answer(record["messages"]), begun_answer(record["messages"])
        prompt = {**record, "messages": messages, "prefill": prefill, "tools": offered.of_record(record)}
        return prompt_datum(prompt, idx=idx, **limits)

    limits = {**_limits(run, tokenizer), "max_length": prompt_limit}
    return _loader(source, run, process, limits, batch_size=batch_size, shuffle=shuffle, tasks=tasks_of(run))


def _warn_of_left_out_answers(source: Source) -> None:
    for member in source.datasets:
        firsts = (member.records[index]["messages"] for index in range(min(_FIRST_ROWS, len(member.records))))
        if member.may_begin_answers and any(messages[-1]["role"] == "assistant" for messages in firsts):
            _log.warning(
                "prompts of %s end with a message of the assistant, which is left out. Set `continue_final_message` in the "
                "section of the dataset: true if it is the beginning of the answer, which the model continues, or else false.",
                member.name,
            )


def conversation_loader(source: Source, run: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> BatchedDataLoader:
    """Conversations that end with the assistant's message."""
    records = run.algorithm.runtime_needs.records
    only_final = records is not None and records.only_final_answer

    def process(record: Mapping[str, Any], *, idx: int, **limits: Any) -> DatumSpec:
        if "messages" not in record:
            raise DataError(f"it has {sorted(record)} but no `messages`: use a dataset of conversations, not of preferences")
        return conversation_datum(record, idx=idx, only_unmask_final=only_final, **limits)

    how: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "is_trained": True}
    return _loader(source, run, process, _limits(run, tokenizer), tasks=tasks_of(run) if run.teachers else _NO_TASKS, **how)


def preference_loader(source: Source, run: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> BatchedDataLoader:
    """Pairs of a chosen and a rejected answer, or labelled answers, as the algorithm needs; `batch_size` counts records."""
    limits = _limits(run, tokenizer)
    process = unpaired_datum if run.algorithm.record_kind == "unpaired" else preference_datum
    return _loader(source, run, process, limits, batch_size=batch_size, shuffle=shuffle, is_trained=True)


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
    limits: Mapping[str, Any],
    *,
    batch_size: int,
    shuffle: bool,
    tasks: tuple[str, Collection[str]] = _NO_TASKS,
    is_trained: bool = False,
) -> BatchedDataLoader:
    def tokenized(one: Source) -> TokenizedRows:
        tokenize = partial(_processor(one, process, is_trained=is_trained), **limits)
        rows = _tokenized(one, tokenize, tasks, run.data.check_rows)
        _reject_if_all_dropped(rows, one, limits["max_length"])
        return rows

    mixture = None
    if source.members is None:
        rows: Sequence[Any] = tokenized(source)
    else:
        rows_by_name = {name: tokenized(member) for name, member in source.members.items()}
        sizes = {name: len(member) for name, member in rows_by_name.items()}
        mixture = Mixture(sizes=sizes, weights=source.weights or sizes)
        rows = ConcatDataset(list(rows_by_name.values()))
    if shuffle and len(rows) < batch_size:
        raise DataError(
            f"The dataset {source.name!r} has {len(rows)} {'record' if len(rows) == 1 else 'records'}, but a step uses "
            f"{batch_size}: use fewer per step, or add data."
        )
    loader = BatchedDataLoader(
        rows,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=run.algorithm.seed,
        drop_last=shuffle and not is_trained and run.data.sampler is None,  # a sampler draws any number of rows
        collate=list,
        mixture=mixture,
        fingerprint=_fingerprint(source),
    )
    if loader.drop_last and len(rows) % batch_size:
        _log.info(
            "each epoch leaves out %d of the %d rows of %s (different ones each time), because they do not fill a step of "
            "%d rows",
            len(rows) % batch_size,
            len(rows),
            source.name,
            batch_size,
        )
    if any(member.on_bad_row is OnBadRow.ERROR for member in source.datasets):  # with skip, all rows were already tokenized
        check_rows(loader, source.name, most=run.data.check_rows)
    return loader


def _fingerprint(source: Source) -> str | None:
    """Fingerprint of the records, or of all members; None if any of them has none."""
    if source.members is None:
        return getattr(source.records, "fingerprint", None)
    members = {name: _fingerprint(member) for name, member in source.members.items()}
    return None if None in members.values() else " ".join(f"{name} {members[name]}" for name in sorted(members))


def _tokenized(source: Source, process: Callable[..., Any], tasks: tuple[str, Collection[str]], checked: int) -> TokenizedRows:
    """The rows of one dataset. If bad rows are skipped, all rows are tokenized now to find them."""
    section, known = tasks
    choice = choose_tasks(
        source.records,
        fixed=source.task_name,
        known=known,
        section=section,
        name=source.name,
        component=source.component,
    )
    rows = TokenizedRows(source.records, process, tasks=choice, name=source.name)
    if source.on_bad_row is OnBadRow.ERROR:
        # Reports a wrong record format or chat template before a worker starts; if there is one, with all rows like it.
        firsts = dict.fromkeys((0, *getattr(source.records, "firsts", ()))) if len(rows) else {}
        if read_rows(rows, firsts)[2]:
            numbers = dict.fromkeys((*firsts, *range(min(checked, len(rows)))))
            rows_of, bad = f"{len(numbers)} checked rows of {source.name}", read_rows(rows, numbers)[2]
            raise BadRowsError(bad, total=len(numbers), rows_of=rows_of, remedy=SKIP_BAD_ROWS)
        return rows
    good, _, bad = read_rows(rows, range(len(rows)))
    if not bad:
        return rows
    if not good:
        raise DataError(f"none of the {len(rows)} records of {source.name} can be tokenized; the first: {bad[0]}")
    source.bad_rows.add_rows(source.name, bad)
    return TokenizedRows(Subset(source.records, good), process, tasks=choice, name=source.name)


def _reject_if_all_dropped(rows: TokenizedRows, source: Source, max_length: int) -> None:
    """Reject a dataset in which all rows are dropped. Stops at the first usable row, usually row 0."""
    if len(rows) and not any(rows[index]["loss_multiplier"] for index in range(len(rows))):
        raise DataError(
            f"all {len(rows)} records of {source.name} are dropped: each has more than {max_length} tokens. Raise "
            "policy.max_total_sequence_length (and data.max_input_seq_length, if it is set)"
        )


def _processor(source: Source, process: Callable[..., Any], *, is_trained: bool) -> Callable[..., Any]:
    """The function that tokenizes a dataset's records: the built-in one, or the user's with a check of its result."""
    name = source.processor
    if name is None:
        return process
    function = load_function(name, "processor")

    def checked(record: Mapping[str, Any], **given: Any) -> Any:
        with reporting_errors(f"processor {name}", function):
            datum = function(record, **given)
        check_processor_result(datum, name, is_trained=is_trained)
        return datum

    return checked


def _mixed(members: Mapping[str, Source], weights: Mapping[str, float] | None) -> Source:
    return Source(
        records=ConcatDataset([member.records for member in members.values()]),
        name=f"mix of {', '.join(members)}",
        bad_rows=next(iter(members.values())).bad_rows,
        members=members,
        weights=weights,
    )


def _hold_out(source: Source, *, fraction: float, seed: int) -> tuple[Source, Source]:
    kept, out = held_out(source.records, fraction=fraction, seed=seed, name=source.name)
    return replace(source, records=kept), replace(source, records=out)


def read_rows(rows: Sequence[Any], numbers: Iterable[int]) -> tuple[list[int], int, list[BadRow]]:
    """The numbers of the rows that can be tokenized, how many of them are dropped as too long, and the other rows."""
    good: list[int] = []
    bad: list[BadRow] = []
    dropped = 0
    for number in numbers:
        try:
            dropped += not rows[number]["loss_multiplier"]
            good.append(number)
        except BadRowError as error:
            bad.append(error.row)
    return good, dropped, bad


def check_rows(loader: BatchedDataLoader, name: str, *, most: int) -> None:
    """Tokenize the next rows of a loader, without drawing them.

    Args:
        loader: its rows are tokenized on access.
        name: name of the data in messages.
        most: largest number of rows to check; tokenizing takes milliseconds per row, too long for large datasets.

    Raises:
        DataError: a row is too long, cannot be rendered or has nothing to train on. The message lists all such rows.
    """
    numbers = loader.next_rows(most)
    _, dropped, bad = read_rows(loader.dataset, numbers)
    if bad:
        raise BadRowsError(bad, total=len(numbers), rows_of=f"{len(numbers)} checked rows of {name}", remedy=SKIP_BAD_ROWS)
    if dropped:
        _log.warning("%d of %d checked rows of %s are too long and dropped", dropped, len(numbers), name)
    if len(numbers) < len(loader.dataset) and numbers:
        _log.info(
            "checked %d of %d rows of %s; the others are checked when they are used (data.check_rows)",
            len(numbers),
            len(loader.dataset),
            name,
        )
