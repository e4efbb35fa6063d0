"""The interface of a dataset: a map-style collection of records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NotRequired, TypedDict

__all__ = ["Dataset", "Record"]


class Record(TypedDict):
    """One row of a dataset.

    Attributes:
        messages: The conversation: {role, content} each, with `tool_calls` in messages that call tools.
        tools: Function definitions that are offered to the model, as returned by `tool_calls.read_tools`.
        extra_env_info: Passed to the environment as metadata.
        task_name: Environment that answers and scores the rollout.
        stop_strings: Strings that end a completion.
    """

    messages: list[dict[str, Any]]
    extra_env_info: dict[str, Any]
    task_name: str
    tools: NotRequired[list[dict[str, Any]]]
    stop_strings: NotRequired[list[str]]


class Dataset(ABC):
    """A finite, indexable collection of records; index i always returns the same record.

    A dataset that reads rows from files may also define: `row_location(index)`, the location of a record's row, for errors;
    `prompt_of(index)`, the prompt as written in the row, by which rows are held out; `skipped` and `reasons`, the number of bad
    rows that were left out and why; `firsts`, indices of records that together cover everything a chat template may reject,
    which are checked first.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...
