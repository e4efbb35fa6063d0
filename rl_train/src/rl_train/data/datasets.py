"""Datasets of prompts and conversations: turns the fields of a row into a record.

A record is {messages, extra_env_info, task_name} with optional tools and stop_strings; a conversation for supervised training
ends with an assistant message.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rl_core.config.schema import DatasetConfig
from rl_core.errors import ConfigError, DataError, format_value
from rl_core.interfaces.records import Record
from rl_train.data.conversations import (
    Messages,
    check_tool_use,
    kind_of,
    paired_text,
    read_messages,
    read_tools,
    tools_of,
    with_system_prompt,
    without_answer,
)
from rl_train.data.records import Records, RowReader, form_hint
from rl_train.data.row_sections import RecordFields
from rl_train.errors import reporting_errors
from rl_train.prompts.templates import PromptTemplate, load_prompt


class RecordReader(RowReader[RecordFields, Record]):
    """Creates one record per row, by the keys of the config or by its function.

    Args:
        config: The meaning of the fields.
        with_examples: Whether prompts contain few-shot examples; searching for the nearest ones reads a file.

    Raises:
        DataError: The prompt config does not exist or is invalid, or few-shot examples have no prompt config.
        ConfigError: The function does not exist.
    """

    called = "row"

    def __init__(self, config: RecordFields, *, with_examples: bool = True) -> None:
        self._template = _template(config)
        if self._template is not None and not with_examples:
            self._template = self._template.without_examples()
        super().__init__(config)

    def records(self, row: dict[str, Any]) -> list[Record]:
        """The row's record."""
        return [self._from_keys(self.with_nested(row)) if self.function is None else self._checked(self.made(row))]

    def kind(self, record: Record) -> frozenset[str]:
        """Features of a record that a chat template may not support: its roles and tool use."""
        return kind_of(record["messages"], record.get("tools"))

    def prompt_of(self, row: dict[str, Any]) -> Any:
        """The prompt: the input field, the fields of the template, or a conversation without its answer."""
        if self.function is not None:
            return without_answer(self.records(row)[0]["messages"])
        row, key = self.with_nested(row), self.config.input_key
        if self._template is not None and key not in row:
            text: Any = {name: row[name] for name in sorted(self._template.names)}
        elif isinstance(text := row[key], list):
            return without_answer(self.with_images(read_messages(text, "the row", role="user"), row))
        images = self.with_images([{"role": "user", "content": ""}], row)[0]["content"]
        return [text, images] if images else text

    def _from_keys(self, row: dict[str, Any]) -> Record:
        config = self.config
        messages = with_system_prompt(self.with_images(self._prompt_messages(row), row), config.system_prompt)
        last = messages[-1]
        if config.continues_answers and last["role"] == "assistant" and last["content"].strip() and "tool_calls" not in last:
            messages[-1] = {"prefix": True, **last}
        if config.response_key is not None:
            given = _field(row, config.response_key, (str, list), "response_key")
            answer = read_messages(given, repr(config.response_key), role="assistant")
            if answer[-1]["role"] != "assistant":
                raise DataError(
                    f"the field {config.response_key!r} ends with a message of the role {answer[-1]['role']!r}: its last "
                    "message must have the role 'assistant'"
                )
            messages.extend(answer)
        info = {key.rpartition(".")[2]: _field(row, key, object, "env_keys") for key in config.env_keys}
        if config.output_key is not None and not (config.may_lack_output and config.output_key not in row):
            expected = _field(row, config.output_key, object, "output_key")
            what = f"the field {config.output_key!r} (`output_key`)"
            info["expected_answer"] = _expected_answer(expected, what, elsewhere="name the field in `env_keys`")
        record = Record(messages=messages, extra_env_info=info, task_name=config.task_name or "default")
        tools = tools_of(row, config.tools_key, is_named=config.names_tools)
        check_tool_use(messages, tools)
        if tools:
            record["tools"] = tools
        if config.stop_strings_key is not None:
            record["stop_strings"] = _texts(_field(row, config.stop_strings_key, list, "stop_strings_key"))
        return record

    def _prompt_messages(self, row: dict[str, Any]) -> Messages:
        key = self.config.input_key
        if self._template is not None and self._template.names and self._template.names <= row.keys():
            return list(self._template.fill(row, input_key=key))
        asked = _field(row, key, (str, list), "input_key")
        if self._template is None:
            return read_messages(asked, repr(key), role="user")
        if not isinstance(asked, str):
            raise DataError(f"the field {key!r} is a list of messages, but prompt templates need a text: remove the template")
        # The only variable of a template is the input, whatever its name.
        renamed = dict.fromkeys(self._template.names, asked) if len(self._template.names) == 1 else {}
        return list(self._template.fill({**renamed, **row}, input_key=key))

    def _checked(self, made: Any) -> Record:
        """Check and complete a record that the function returned."""
        name = self.config.record_fn
        if not isinstance(made, Mapping) or "messages" not in made:
            found = sorted(made) if isinstance(made, Mapping) else format_value(made)
            raise DataError(f"{name} returned {found}: expected a record with `messages`")
        allowed = (*Record.__annotations__, *filter(None, [self.config.images_key]))
        if unknown := sorted(made.keys() - set(allowed)):
            raise DataError(f"{name} returned a record with {unknown}: allowed keys are {', '.join(allowed)}")
        read = read_messages(made["messages"], f"the result of {name}", role="user")
        messages = with_system_prompt(self.with_images(read, made), self.config.system_prompt)
        info = dict(made.get("extra_env_info") or {})
        _expected_answer(
            info.get("expected_answer"),
            f"`expected_answer` of the result of record_fn {name}",
            elsewhere="return it under another key of `extra_env_info`",
        )
        record = Record(messages=messages, extra_env_info=info, task_name=self.config.task_name or "default")
        tools = read_tools(made.get("tools"), f"`tools` of the result of {name}")
        check_tool_use(messages, tools)
        if tools:
            record["tools"] = tools
        if made.get("task_name") is not None:
            record["task_name"] = made["task_name"]
        if made.get("stop_strings") is not None:
            record["stop_strings"] = _texts(made["stop_strings"])
        return record


class RecordDataset(Records[Record]):
    """The prompts or conversations of any source."""

    reader = RecordReader


def _template(config: RecordFields) -> PromptTemplate | None:
    if config.prompt is None:
        if config.examples_type is not None:
            raise DataError("examples_type has no effect without a prompt config: set `prompt`")
        return None
    template = load_prompt(config.prompt, config.examples_type)
    return template if config.system_prompt is None else replace(template, system=None)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise DataError(f"the stop strings are {format_value(values)}: expected a list of texts")
    return values


def _field(row: dict[str, Any], key: str, kind: type | tuple[type, ...], config_key: str) -> Any:
    if key not in row:
        remedy = form_hint(row) or _remedy(config_key, row)
        raise DataError(f"the field {key!r} (`{config_key}`) is missing: the row has {sorted(row)}{remedy}", key=config_key)
    if not isinstance(row[key], kind) or row[key] is None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("a value" if each is object else each.__name__ for each in kinds)
        raise DataError(f"the field {key!r} (`{config_key}`) is {format_value(row[key])}: expected {names}", key=config_key)
    return row[key]


def _expected_answer(value: Any, what: str, *, elsewhere: str) -> Any:
    """A text, number or boolean, which an environment can compare with an answer.

    Args:
        value: what the row or the function has.
        what: names it in errors.
        elsewhere: how an environment that reads other values gets them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(
            f"{what} is {value}, which cannot be compared with an answer. Write a number or a text, or remove the row"
        )
    if value is not None and not isinstance(value, str | numbers.Number):
        raise DataError(
            f"{what} is {format_value(value)}: an expected answer is a text or a number. Write it as text, or {elsewhere} for "
            "an environment of yours that reads it"
        )
    return paired_text(value, what) if isinstance(value, str) else value


def _remedy(config_key: str, row: dict[str, Any]) -> str:
    """An additional hint for a missing field."""
    if config_key == "output_key":
        return ". If there is none, set `output_key: null`"
    if config_key == "input_key" and "messages" in row:
        return ". For conversations, set `input_key: messages` and `output_key: null`"
    return ""


_FORMS = ({"messages"}, {"prompt", "chosen", "rejected"}, {"prompt", "completion", "label"})
_FORM = (
    "A record is a dict with `messages` (a list of {role, content}), with `prompt`, `chosen` and `rejected`, or with `prompt`, "
    "`completion` and `label`."
)


def make_dataset(dataset_class: Any, section: DatasetConfig) -> Any:
    """The dataset of a section, whose class may be a user's; its first record is checked.

    Args:
        dataset_class: its class, called with the section.
        section: the section.

    Raises:
        ConfigError: the class is not a dataset, it raised, or its first record has another form.
        DataError: the data cannot be read.
    """
    name = section.dataset_name
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset_class, method)]
    if missing:
        raise ConfigError(
            f"{name} is not a dataset: it has no {' and no '.join(missing)}. Derive a class from "
            "rl_core.interfaces.records.Dataset."
        )
    with reporting_errors(f"The dataset {name}", dataset_class):
        made = dataset_class(section)
        size = len(made)
    if not size:
        raise ConfigError(f"The dataset {name} is empty: its length is 0.")
    with suppress(DataError):  # a bad row, which is reported or skipped later
        record = record_of(made, 0, name=name)
        if section.processor is None and not any(form <= record.keys() for form in _FORMS):
            raise ConfigError(f"Record 0 of the dataset {name} has {sorted(record)}. {_FORM}")
    return made


def record_of(dataset: Any, index: Any, *, name: str) -> Mapping[str, Any]:
    """A record of a dataset; `name` names the dataset in errors.

    Raises:
        ConfigError: its class raised, or returned something else.
        DataError: the row is bad.
    """
    label = f"Record {index} of the dataset {name}"
    with reporting_errors(f"{label}: `__getitem__`", type(dataset)):
        record = dataset[index]
    if not isinstance(record, Mapping):
        raise ConfigError(f"{label} is {format_value(record)}. {_FORM}")
    return record
