"""Functions that turn the fields of a row into a record: the packaged ones, and those given by a path.

A function raises `DataError` for an invalid row, which is then reported with its location, or skipped. Any other exception is
a bug in the function and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import ConfigError, DataError, format_value
from rl_core.plugins.component import is_path
from rl_core.plugins.import_path import resolve
from rl_train.data.tool_calls import from_text

RecordFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """{instruction, input, output} as a conversation of two messages; `input` may be empty or missing."""
    instruction, answer = _text(row, "instruction"), _text(row, "output")
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise DataError(f"the field 'input' is {format_value(given)}: expected a text")
    question = f"{instruction}\n\n{given}" if given else instruction
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """{question, answer}, where the number after `####` in the answer is what the environment expects."""
    question, answer = _text(row, "question"), _text(row, "answer")
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"the field 'answer' has no number after ####: {answer[-60:]!r}")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "extra_env_info": {"expected_answer": number.strip().replace(",", "")}}


_RECORD = ("messages", "tools", "extra_env_info", "task_name", "stop_strings")


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """{messages} with optional tools, extra_env_info, task_name and stop_strings: an unchanged record."""
    if row.get("messages") is None:
        raise DataError(f"the field 'messages' is missing: the row has {sorted(row)}{form_hint(row)}")
    return {key: row[key] for key in _RECORD if row.get(key) is not None}


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


def sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """{conversations: [{from, value}]}, with optional `system` and `tools`; the value of a `function_call` is JSON."""
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise DataError(f"the field 'conversations' is {format_value(turns)}: expected a list of {{from, value}}")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or turn.get("from") not in _SHAREGPT_ROLES:
            raise DataError(
                f"turn {number} of 'conversations' is {format_value(turn)}: expected `from` in {', '.join(_SHAREGPT_ROLES)}"
            )
        message = {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}
        if turn["from"] == "function_call":
            called = from_text(turn.get("value"), f"the call in turn {number}")
            message.update(content="", tool_calls=called if isinstance(called, list) else [called])
        messages.append(message)
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {"messages": messages, "tools": row.get("tools") or []}


PACKAGED: Mapping[str, RecordFunction] = {"alpaca": alpaca, "gsm8k": gsm8k, "record": record, "sharegpt": sharegpt}


_FIELDS = {"sharegpt": {"conversations"}, "alpaca": {"instruction", "output"}}


def form_hint(row: Mapping[str, Any]) -> str:
    """The rest of an error about a row that has the fields of a packaged function; '' for other rows."""
    found = next((name for name, fields in _FIELDS.items() if fields <= row.keys()), None)
    return "" if found is None else f". It has the fields of {found}: set `record_fn: {found}`"


def load_record_function(name: str) -> RecordFunction:
    """The packaged function of this name, or the one at this path.

    Raises:
        ConfigError: The function does not exist.
    """
    if name not in PACKAGED and not is_path(name):
        raise ConfigError(f"record_fn is {name!r}: expected {', '.join(PACKAGED)}, or the path of a function.")
    return PACKAGED[name] if name in PACKAGED else load_function(name, "record_fn")


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module.function` or `package.module:function`.

    Args:
        path: The import path.
        key: The config key of the function, for errors.

    Raises:
        ConfigError: The module cannot be imported, or has no such function.
    """
    function: Callable[..., Any] = resolve(path, key=key)
    if not callable(function):
        raise ConfigError(f"`{key}`: {path!r} is {function!r}, not a function.")
    return function


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"the field {key!r} is {format_value(value)}: expected a text, and the row has {sorted(row)}")
    return value
