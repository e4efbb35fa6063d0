"""Base of the datasets that generate record i from their config and i, and the split of their problems."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_core.config.validator import read_section
from rl_core.interfaces.records import Dataset, Record
from rl_envs.config import GeneratedDatasetConfig

HELD_OUT = 8
"""One in this many problems is reserved for validation."""
MAX_DRAWS = 10_000
"""Maximum draws to find a problem of a split. One in `HELD_OUT` is in validation, so a miss means that the split has none."""


class GeneratedDataset(Dataset):
    """A dataset without files: record i is a pure function of the config and i.

    Args:
        config: A section of the class `config_class`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """

    config_class: ClassVar[type[GeneratedDatasetConfig]]
    """The model of the section."""

    def __init__(self, config: GeneratedDatasetConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(self.config_class, config)

    def __len__(self) -> int:
        return self.config.num_samples

    @abstractmethod
    def generate(self, index: int) -> Record:
        """The record at an index, which is at least 0 and below the length of the dataset."""

    def __getitem__(self, index: int) -> Record:
        """The record at that index; negative indices count from the end.

        Raises:
            IndexError: The index is out of range.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.generate(index % len(self))


def is_reserved(problem: str) -> bool:
    """Whether a problem belongs to validation: decided by a hash of this text, so that no problem is in both splits."""
    return hashlib.blake2b(problem.encode(), digest_size=8).digest()[0] % HELD_OUT == 0
