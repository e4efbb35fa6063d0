"""Datasets of prompts and conversations: what the fields of a row mean; knows no source of rows and no tokenizer.

A record is {messages, extra_env_info, task_name} with, where they are, tools and stop_strings; a conversation for supervised
training ends with the assistant's message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_core.data.formatting import format_value
from rl_core.data.tool_calls import check_tool_use, read_tools, tools_of
from rl_core.errors import DataError
from rl_core.interfaces.dataset import Record
from rl_train.data.conversations import Messages, kind_of, read_messages, with_system_prompt, without_answer
from rl_train.data.dataset_config import RecordForm
from rl_train.data.prompts import PromptTemplate, load_prompt
from rl_train.data.record_functions import load_record_function
from rl_train.data.records import Records, Rows
from rl_train.data.sources import open_rows


class RecordDataset(Records[Record]):
    """The prompts or conversations of any source.

    Args:
        config: Which source, which fields.
        rows: The source, in place of the one that the config names.

    Raises:
        DataError: The source is absent or has no good row, or a row is bad; names its place.
    """

    def __init__(self, config: RecordForm, rows: Rows | None = None) -> None:
        super().__init__(open_rows(config) if rows is None else rows, ReadsRecords(config), on_bad_row=config.on_bad_row)
        self.config = config


class ReadsRecords:
    """Makes one record of a row, by the config's keys or by its function.

    Args:
        config: Which fields are what.

    Raises:
        DataError: There is no such prompt template.
        ConfigError: There is no such function.
    """

    called = "row"

    def __init__(self, config: RecordForm) -> None:
        self._config = config
        self._template = None if config.prompt is None else _template(config)
        self._function = None if config.record_fn is None else load_record_function(config.record_fn)

    def records(self, row: dict[str, Any]) -> list[Record]:
        """The row's record."""
        if self._function is not None:
            return [self._checked(self._function(row))]
        return [self._from_keys(row)]

    def kind(self, record: Record) -> frozenset[str]:
        """See `Form`."""
        return kind_of(record["messages"], record.get("tools"))

    def asked(self, row: dict[str, Any]) -> Any:
        """The field that is asked, or what the template asks for; a conversation without its answer."""
        if self._function is not None:
            return without_answer(self.records(row)[0]["messages"])
        key = self._config.input_key
        if self._template is not None and key not in row:
            return {name: row[name] for name in sorted(self._template.names)}
        value = row[key]
        return value if isinstance(value, str) else without_answer(read_messages(value, "the row", role="user"))

    def _from_keys(self, row: dict[str, Any]) -> Record:
        config = self._config
        messages = with_system_prompt(self._asked_messages(row), config.system_prompt)
        if config.response_key is not None:
            given = _field(row, config.response_key, (str, list), "response_key")
            answer = read_messages(given, repr(config.response_key), role="assistant")
            if answer[-1]["role"] != "assistant":
                raise DataError(f"the field {config.response_key!r} ends with what the {answer[-1]['role']} says: no answer")
            messages.extend(answer)
        info = {key: _field(row, key, object, "env_keys") for key in config.env_keys}
        if config.output_key is not None:
            info["expected_answer"] = _field(row, config.output_key, object, "output_key")
        record = Record(messages=messages, extra_env_info=info, task_name=config.task_name or "default")
        tools = tools_of(row, config.tools_key, is_named=config.names_tools)
        check_tool_use(messages, tools)
        if tools:
            record["tools"] = tools
        if config.stop_strings_key is not None:
            record["stop_strings"] = _texts(_field(row, config.stop_strings_key, list, "stop_strings_key"))
        return record

    def _asked_messages(self, row: dict[str, Any]) -> Messages:
        key = self._config.input_key
        if self._template is not None and self._template.names and self._template.names <= row.keys():
            return list(self._template.fill(row, input_key=key))
        asked = _field(row, key, (str, list), "input_key")
        if self._template is None:
            return read_messages(asked, repr(key), role="user")
        if not isinstance(asked, str):
            raise DataError(
                f"the field {key!r} is a list of messages, and the prompt template is for texts: leave out the template"
            )
        # A template with one field means the question, whatever the row calls it.
        renamed = dict.fromkeys(self._template.names, asked) if len(self._template.names) == 1 else {}
        return list(self._template.fill({**renamed, **row}, input_key=key))

    def _checked(self, made: Any) -> Record:
        """What the function gave, held to what a record is."""
        name = self._config.record_fn
        if not isinstance(made, Mapping) or "messages" not in made:
            found = sorted(made) if isinstance(made, Mapping) else format_value(made)
            raise DataError(f"{name} gave {found}: expected a record, which has `messages`")
        if unknown := sorted(made.keys() - Record.__annotations__.keys()):
            raise DataError(f"{name} gave a record with {unknown}: a record has {', '.join(Record.__annotations__)}")
        messages = read_messages(made["messages"], f"what {name} gave", role="user")
        messages = with_system_prompt(messages, self._config.system_prompt)
        info = dict(made.get("extra_env_info") or {})
        record = Record(messages=messages, extra_env_info=info, task_name=self._config.task_name or "default")
        tools = read_tools(made.get("tools"), f"`tools` of what {name} gave")
        check_tool_use(messages, tools)
        if tools:
            record["tools"] = tools
        if made.get("task_name") is not None:
            record["task_name"] = made["task_name"]
        if made.get("stop_strings") is not None:
            record["stop_strings"] = _texts(made["stop_strings"])
        return record


def _template(config: RecordForm) -> PromptTemplate:
    assert config.prompt is not None
    template = load_prompt(config.prompt)
    return template if config.system_prompt is None else replace(template, system=None)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise DataError(f"the stop strings are {format_value(values)}: expected a list of texts")
    return values


def _field(row: dict[str, Any], key: str, kind: type | tuple[type, ...], config_key: str) -> Any:
    if key not in row:
        raise DataError(f"the field {key!r} (`{config_key}`) is absent: the row has {sorted(row)}{_remedy(config_key, row)}")
    if not isinstance(row[key], kind) or row[key] is None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("a value" if each is object else each.__name__ for each in kinds)
        raise DataError(f"the field {key!r} (`{config_key}`) is {format_value(row[key])}: expected {names}")
    return row[key]


def _remedy(config_key: str, row: dict[str, Any]) -> str:
    """What to say about a field that is absent, where there is more to say than its key."""
    if config_key == "output_key":
        return ". Where there is none to give, say `output_key: null`"
    if config_key == "input_key" and "messages" in row:
        return ". Conversations are read with `input_key: messages` and `output_key: null`"
    return ""
