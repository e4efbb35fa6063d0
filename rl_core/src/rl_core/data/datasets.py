"""Datasets: sequences of records, read whole and checked; knows no tokenizer.

A record is {messages, extra_env_info, task_name} with, where they are, stop_strings; a conversation for supervised training
ends with the assistant's message.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from rl_core.data.dataset_config import JsonlDatasetConfig
from rl_core.data.json_lines import JsonLines
from rl_core.data.prompts import PromptTemplate, load_prompt
from rl_core.errors import DataError


class Record(TypedDict):
    """One row of a dataset.

    Attributes:
        messages: The conversation: {role, content} each.
        extra_env_info: What the environment knows of it.
        task_name: Which environment answers and scores.
        stop_strings: Texts that end a completion.
    """

    messages: list[dict[str, Any]]
    extra_env_info: dict[str, Any]
    task_name: str
    stop_strings: NotRequired[list[str]]


class JsonlDataset(JsonLines[Record]):
    """The records of a file of JSON lines.

    Args:
        config: Which file, which fields.

    Raises:
        DataError: The file is absent or has no good row, or a row is bad; names file and line.
    """

    def __init__(self, config: JsonlDatasetConfig) -> None:
        template = None if config.prompt is None else load_prompt(config.prompt)
        super().__init__(
            config.path, lambda row: [record_from_row(row, config, template)], on_bad_row=config.on_bad_row, called="row"
        )
        self.config = config


def record_from_row(row: dict[str, Any], config: JsonlDatasetConfig, template: PromptTemplate | None) -> Record:
    """The record that the config makes of one row's fields.

    Args:
        row: The fields.
        config: Which of them are what.
        template: The prompt template for a text input; None leaves the text as it is.

    Raises:
        DataError: A field is absent or of the wrong kind.
    """
    messages = _messages(row, config, template)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if config.response_key is not None:
        messages.append({"role": "assistant", "content": _field(row, config.response_key, str)})
    info = {key: _field(row, key, object) for key in config.env_keys}
    if config.output_key is not None:
        info["expected_answer"] = _field(row, config.output_key, object)
    record = Record(messages=messages, extra_env_info=info, task_name=config.task_name)
    if config.stop_strings_key is not None:
        record["stop_strings"] = _field(row, config.stop_strings_key, list)
    return record


def _messages(row: dict[str, Any], config: JsonlDatasetConfig, template: PromptTemplate | None) -> list[dict[str, Any]]:
    asked = _field(row, config.input_key, (str, list))
    if isinstance(asked, str):
        return (
            [{"role": "user", "content": asked}] if template is None else list(template.fill(row, input_key=config.input_key))
        )
    for number, message in enumerate(asked):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"message {number} of {config.input_key!r} is no {{role, content}}: found {message!r}")
    if not asked:
        raise DataError(f"{config.input_key!r} is an empty list: expected messages")
    return [dict(message) for message in asked]


def _field(row: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    if key not in row:
        raise DataError(f"the field {key!r} is absent: the row has {sorted(row)}")
    if not isinstance(row[key], kind) or row[key] is None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("a value" if each is object else each.__name__ for each in kinds)
        raise DataError(f"the field {key!r} is {row[key]!r}: expected {names}")
    return row[key]
