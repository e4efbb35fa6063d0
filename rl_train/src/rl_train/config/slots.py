"""The sections of a config that belong to components: their keys, and what selects the component of each.

The only list of them. The loader, the JSON schema, the config reference, `rlcore explain` and the checks derive from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Kind

ANY = "<name>"
"""Placeholder for a key that the user chooses, the last of a path: the task of `env.<name>`."""

FUNCTIONS = "function"
"""The environment whose rewards are plain functions."""
AGENT = "agent"
"""The environment of a task whose agent returns the reward."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A section of a config that belongs to a component, or several with names that the user chooses.

    Attributes:
        path: Its key, which may end in `ANY`.
        kind: Kind of the component.
        selector: Key of the section that has the name of the component; None if it has no such key.
        is_named_by_key: Whether the last key of the path is the name of the component if the section does not select another.
        path_selector: Key of the section with the dotted path of a class, used instead of a registered name.
        selected_by: Keys that select a component if the section has them and no name.
        is_required: Whether the section exists even if the config does not have it.
        implied: Defaults of keys that follow from the path.
    """

    path: KeyPath
    kind: Kind
    selector: str | None = None
    is_named_by_key: bool = False
    path_selector: str | None = None
    selected_by: Mapping[str, str] = field(default_factory=dict)
    is_required: bool = False
    implied: Mapping[str, Any] = field(default_factory=dict)


SLOTS = (
    Slot(path=(ANY,), kind=Kind.ALGORITHM, is_named_by_key=True),
    Slot(path=("loss_fn",), kind=Kind.LOSS, selector="name", is_required=True),
    Slot(path=("policy",), kind=Kind.POLICY, selector="backend", is_required=True),
    Slot(path=("policy", "generation"), kind=Kind.GENERATION, selector="backend"),
    Slot(path=("value",), kind=Kind.POLICY, selector="backend", implied={"head": "scalar", "frozen": False}),
    Slot(path=("teacher",), kind=Kind.POLICY, selector="backend", implied={"head": "tokens", "frozen": True}),
    Slot(path=("data", "train"), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "validation"), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "validation_sets", ANY), kind=Kind.DATASET, selector="dataset_name"),
    Slot(path=("data", "mix", ANY), kind=Kind.DATASET, selector="dataset_name"),
    Slot(
        path=("env", ANY),
        kind=Kind.ENVIRONMENT,
        selector="name",
        path_selector="env_cls",
        selected_by={"reward_fn": FUNCTIONS, "reward_fns": FUNCTIONS, "agent": AGENT},
        is_named_by_key=True,
    ),
    Slot(path=("logger", "loggers", ANY), kind=Kind.LOGGER, is_named_by_key=True),
)

COMPANIONS = {str(slot.path[0]): slot.implied for slot in SLOTS if slot.kind is Kind.POLICY and slot.implied}
"""Sections of models in addition to the policy, with the values that each implies."""
FUNCTION_KEYS = tuple(key for slot in SLOTS for key, name in slot.selected_by.items() if name == FUNCTIONS)
"""Keys of `env.<task>` that select the environment `FUNCTIONS`."""


def slots_of(kind: Kind) -> list[Slot]:
    """The slots of a kind of component."""
    return [slot for slot in SLOTS if slot.kind is kind]


def matches(pattern: KeyPath, path: KeyPath) -> bool:
    """Whether a key is the path of a slot, with any name for `ANY`."""
    return len(pattern) == len(path) and all(key in (name, ANY) for key, name in zip(pattern, path, strict=True))


def is_named_by_user(path: KeyPath) -> bool:
    """Whether a key is a name that the user chooses in a section that accepts any name, such as `env`."""
    return len(path) > 1 and any(slot.path[-1] == ANY and matches(slot.path, path) for slot in SLOTS)


def sections_at(holder: BaseModel, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The sections that a model has at the path of a slot, each with its key; those that are not set are skipped."""
    *parents, last = path
    section: Any = holder
    for key in parents:
        section = getattr(section, str(key))
    if last == ANY:
        yield from (((*parents, name), member) for name, member in section.items())
    elif getattr(section, str(last)) is not None:
        yield path, getattr(section, str(last))
