"""A NeMo RL config as plain values, with what its conversion needs to know of the whole; and the outcome for one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "???"
"""A value that must be set by a config that inherits from this one."""

ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
"""The supported algorithms; the first section found is used."""


@dataclass(frozen=True)
class Mapped:
    """The value is kept, under one or more new keys.

    Attributes:
        values: New values by dotted key.
        note: How the meaning changes; empty if it does not.
    """

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Redundant:
    """The key is not needed: this is the behavior anyway, or the feature is disabled in the imported config."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """The setting is unsupported."""

    reason: str


Decision = Mapped | Redundant | Unsupported


@dataclass(frozen=True, kw_only=True)
class Defaulted:
    """A new key that corresponds to no imported key.

    Attributes:
        key: The dotted key.
        value: Its value.
        reason: Why it is needed.
    """

    key: str
    value: Any
    reason: str


class ForeignConfig:
    """The whole imported config.

    Args:
        values: The sections with interpolations resolved.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or `???`."""
        value: Any = self.values
        for part in key.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == MISSING else value

    def number(self, key: str, default: int) -> int:
        """The integer at a dotted key, or the default."""
        value = self.get(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def algorithm(self) -> str | None:
        """The first algorithm of the config that rlcore supports, or None."""
        return next((name for name in ALGORITHMS if name in self.values), None)

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples."""
        return self.algorithm in ("grpo", "ppo", "distillation")

    @property
    def has_pairs(self) -> bool:
        """Whether the algorithm trains on preference pairs. NeMo RL counts pairs; rlcore counts two rows per pair."""
        return self.algorithm in ("dpo", "rm")

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.number("cluster.gpus_per_node", 1) * self.number("cluster.num_nodes", 1)

    @property
    def held_out_share(self) -> float:
        """Fraction of the training data that NeMo RL holds out if there is no other validation data; 0.0 if none."""
        written = self.get("data.train.split_validation_size", self.get("data.default.split_validation_size", 0.0))
        is_share = isinstance(written, float) and 0.0 < written < 1.0
        return written if is_share and self.get("data.validation") is None else 0.0

    @property
    def validates(self) -> bool:
        """Whether there is validation data that can be converted."""
        held_out = self.get("data.validation")
        is_one = isinstance(held_out, Mapping) or (isinstance(held_out, list) and len(held_out) == 1)
        return is_one or self.get("data.val_data_path") is not None or self.held_out_share > 0.0
