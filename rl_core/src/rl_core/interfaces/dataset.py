"""What is asked: a map-style sequence of records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NotRequired, TypedDict


class Record(TypedDict):
    """One thing to ask or to imitate."""

    messages: list[dict[str, Any]]
    """The conversation so far; for supervised training it ends with the assistant's message."""
    extra_env_info: NotRequired[dict[str, Any]]
    """What the environment needs to score it, such as `expected_answer`."""
    task_name: NotRequired[str]
    """Which environment of the config's `env` section answers."""
    stop_strings: NotRequired[list[str]]


class Dataset(ABC):
    """A finite, indexable collection of records; index i is always the same record."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...
